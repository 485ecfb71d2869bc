"""The engine on a GPU: same tokens in fp32, close logits in 16 bits."""

from __future__ import annotations

import pytest
import torch

from minisgl import LLM, EngineConfig, SamplingParams
from minisgl.core import WorkCounts
from minisgl.models.register import build_model
from minisgl.models.weight import load_weights
from minisgl.simple import Recompute, cached_generate, naive_generate, step
from tests.helpers import hf_state, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
PROMPT = [3, 99, 14, 15, 92, 65, 35]


def on_gpu(model, dtype):
    twin = build_model(model.config)
    load_weights(twin, hf_state(model).items(), torch.device("cuda"), dtype)
    return twin


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("generate", [naive_generate, cached_generate])
def test_fp32_greedy_tokens_equal_those_of_the_cpu(architecture, generate):
    model = tiny_model(architecture)
    params = SamplingParams(max_tokens=40, ignore_eos=True)

    assert list(generate(on_gpu(model, torch.float32), PROMPT, params)) == list(generate(model, PROMPT, params))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_logits_are_close_to_fp32s(dtype):
    model = tiny_model()
    with torch.inference_mode():
        expected = step(model, PROMPT, 0, Recompute(), WorkCounts())
        logits = step(on_gpu(model, dtype), PROMPT, 0, Recompute(), WorkCounts())

    error = (logits.float().cpu() - expected).norm() / expected.norm()
    assert error < 0.03  # 8 bits of mantissa, two layers; a wrong term costs 0.5 or more


def test_a_seed_gives_the_same_tokens_again():
    model = on_gpu(tiny_model(), torch.float32)
    params = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, seed=7, ignore_eos=True)

    assert list(cached_generate(model, PROMPT, params)) == list(cached_generate(model, PROMPT, params))


def test_auto_takes_the_gpu_and_the_checkpoints_dtype(tiny_folder):
    llm = LLM(EngineConfig(model=str(tiny_folder)))

    assert (llm.model.device.type, llm.model.dtype) == ("cuda", torch.float32)
    assert llm.generate(["Hello"])[0].finish_reason in ("stop", "length")
