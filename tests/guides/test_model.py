"""The guide's model: Qwen2, from a folder, beside transformers' own."""

from __future__ import annotations

import json
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from chapters.reference.examples import add_model
from minisgl import LLM, EngineConfig, SamplingParams
from minisgl.models import BadCheckpoint, UnsupportedModel
from minisgl.models.config import DEFAULTS
from minisgl.models.register import MODELS
from tests.tiny_tokenizer import byte_level_tokenizer

PROMPTS = [[3, 99, 14, 15, 92, 65, 35], [3, 99, 14, 15, 92, 65, 36, 1], [5] * 33, [120]]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True, detokenize=False)
SHAPE = {
    "vocab_size": 300, "hidden_size": 36, "intermediate_size": 52, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def registered():
    with patch.dict(MODELS), patch.dict(DEFAULTS):
        add_model.register()
        yield


@pytest.fixture(scope="module")
def twin():
    """A tiny random Qwen2 of transformers, in which a forgotten bias would show."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen2Config(**SHAPE, bos_token_id=1, eos_token_id=0, attn_implementation="eager")
    model = transformers.Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


@pytest.fixture
def folder(twin, tmp_path):
    twin.save_pretrained(tmp_path)
    byte_level_tokenizer().save_pretrained(tmp_path)
    return tmp_path


@torch.inference_mode()
def transformers_tokens(twin, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    found = twin.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, min_new_tokens=12,
                          do_sample=False, pad_token_id=0)  # fmt: skip
    return found[0, len(prompt) :].tolist()


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("chapter", [1, 5, 10])
def test_greedy_tokens_are_those_of_transformers(twin, folder, chapter):
    with LLM(EngineConfig.chapter(chapter, model=str(folder), device="cpu", dtype="float32")) as llm:
        answers = llm.generate(PROMPTS, GREEDY)

    assert [a.token_ids for a in answers] == [transformers_tokens(twin, prompt) for prompt in PROMPTS]


def test_without_registration_the_checkpoint_is_refused_by_its_architecture(folder):
    with pytest.raises(UnsupportedModel, match=r"architectures are .*Qwen2ForCausalLM"):
        LLM(EngineConfig(model=str(folder)))


@pytest.mark.usefixtures("registered")
class TestStrictness:
    def test_a_bias_that_is_missing_is_named(self, folder):
        weights = load_file(folder / "model.safetensors")
        del weights["model.layers.1.self_attn.k_proj.bias"]
        save_file(weights, folder / "model.safetensors")

        with pytest.raises(BadCheckpoint, match=r"1 missing: model\.layers\.1\.self_attn\.k_proj\.bias"):
            LLM(EngineConfig(model=str(folder), device="cpu"))

    def test_a_bias_that_the_model_has_no_place_for_is_named(self, folder):
        weights = load_file(folder / "model.safetensors")
        weights["model.layers.0.self_attn.o_proj.bias"] = torch.zeros(36)
        save_file(weights, folder / "model.safetensors")

        with pytest.raises(BadCheckpoint, match=r"1 left over: model\.layers\.0\.self_attn\.o_proj\.bias"):
            LLM(EngineConfig(model=str(folder), device="cpu"))

    @pytest.mark.parametrize(("field", "value"), [("use_sliding_window", True), ("logit_scale", 2.0)])
    def test_a_config_field_that_would_change_the_answers_is_refused(self, folder, field, value):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))

        with pytest.raises(UnsupportedModel, match=f"config field {field} is"):
            LLM(EngineConfig(model=str(folder), device="cpu"))
