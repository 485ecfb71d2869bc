"""The whole chapter at once: greedy tokens equal those of transformers. No task asks for this file alone."""

from __future__ import annotations

import pytest
import torch
import transformers

from minisgl.core import SamplingParams
from minisgl.simple import naive_generate
from tests.helpers import hf_twin, tiny_model


def greedy_by_transformers(
    model: transformers.PreTrainedModel, prompt: list[int], max_tokens: int, eos: tuple[int, ...] = ()
) -> list[int]:
    out = model.generate(
        torch.tensor([prompt]),
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=list(eos) or None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_greedy_tokens_of_a_random_decoder_equal_those_of_transformers(architecture: str, tied: bool):
    model = tiny_model(architecture, tie_word_embeddings=tied)
    twin = hf_twin(model)

    for prompt in ([5], list(range(40, 73))):
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        assert list(naive_generate(model, prompt, params)) == greedy_by_transformers(twin, prompt, params.max_tokens)


def test_both_end_at_the_same_end_of_sequence_token():
    model = tiny_model()
    prompt = [5, 17, 60]
    free_running = list(naive_generate(model, prompt, SamplingParams(max_tokens=24, ignore_eos=True)))
    eos = (free_running[9], 130)
    model, params = tiny_model(eos_token_ids=eos), SamplingParams(max_tokens=24)

    answer = list(naive_generate(model, prompt, params))

    assert answer == free_running[: free_running.index(eos[0]) + 1]
    assert answer == greedy_by_transformers(hf_twin(model), prompt, params.max_tokens, eos)


@pytest.mark.model
@pytest.mark.slow
def test_greedy_tokens_of_smollm2_equal_those_of_transformers():
    from minisgl.config import EngineConfig
    from minisgl.llm import LLM

    llm = LLM(EngineConfig.chapter(1, dtype="float32", device="cpu"))
    twin = transformers.AutoModelForCausalLM.from_pretrained(llm.path, dtype=torch.float32)
    prompt = llm.encode([{"role": "user", "content": "What is the capital of France?"}])

    answer = list(naive_generate(llm.model, prompt, SamplingParams(max_tokens=16)))

    assert llm.tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
    assert answer == greedy_by_transformers(twin, prompt, 16, llm.model.config.eos_token_ids)
