from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from minisgl.core import ForwardBatch
from minisgl.layers.rotary import RopeConfig
from minisgl.models.config import ModelConfig
from minisgl.models.llama import LlamaForCausalLM
from minisgl.models.register import MODELS, build_model
from minisgl.models.weight import iter_weights, load_weights
from minisgl.simple import Recompute
from tests.helpers import ROPES, hf_twin, tiny_model
from tests.tolerances import SMOLLM2_LOGITS, TINY_LOGITS


@torch.inference_mode()
def logits(model: LlamaForCausalLM, ids: torch.Tensor, start: int = 0) -> torch.Tensor:
    return model(ForwardBatch(ids, torch.arange(start, start + len(ids)), Recompute()))


@torch.inference_mode()
def hf_logits(twin: transformers.PreTrainedModel, ids: torch.Tensor, start: int = 0) -> torch.Tensor:
    return twin(ids[None], position_ids=torch.arange(start, start + len(ids))[None]).logits[0]


def random_ids(vocab_size: int, length: int) -> torch.Tensor:
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(1))


VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True},
    "head-dim-80": {"head_dim": 80},
    "one-kv-head": {"num_kv_heads": 1},
    "ungrouped": {"num_kv_heads": 6},
    "large-eps": {"rms_norm_eps": 0.1},
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("architecture", MODELS)
def test_logits_equal_those_of_transformers(architecture: str, variant: dict[str, Any]):
    model = tiny_model(architecture, **variant)
    ids = random_ids(131, 37)

    TINY_LOGITS.check(logits(model, ids), hf_logits(hf_twin(model), ids))


def test_logits_of_a_llama_with_mlp_biases_equal_those_of_transformers():
    model = tiny_model(mlp_bias=True)
    ids = random_ids(131, 37)

    TINY_LOGITS.check(logits(model, ids), hf_logits(hf_twin(model), ids))


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
@pytest.mark.parametrize("architecture", MODELS)
def test_logits_beyond_the_original_context_equal_those_of_transformers(architecture: str, rope: RopeConfig):
    model = tiny_model(architecture, rope=rope)
    ids = random_ids(131, 150)

    TINY_LOGITS.check(logits(model, ids), hf_logits(hf_twin(model), ids))


def test_only_the_rows_asked_for_get_logits():
    model = tiny_model()
    ids = random_ids(131, 9)
    batch = ForwardBatch(ids, torch.arange(9), Recompute(), output_rows=torch.tensor([8, 2]))

    with torch.inference_mode():
        rows = model(batch)

    TINY_LOGITS.check(rows, logits(model, ids)[[8, 2]])


@pytest.mark.model
@pytest.mark.slow
def test_logits_of_smollm2_equal_those_of_transformers(smollm2_path):
    model = build_model(ModelConfig.from_folder(smollm2_path))
    load_weights(model, iter_weights(smollm2_path), torch.device("cpu"), torch.float32)
    twin = transformers.AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
    ids = random_ids(49152, 64)

    SMOLLM2_LOGITS.check(logits(model, ids), hf_logits(twin, ids))
