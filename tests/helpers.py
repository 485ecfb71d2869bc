"""Tiny random decoders for tests, and their twins in transformers."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch

from minisgl.layers.linear import MergedLinear
from minisgl.layers.rotary import RopeConfig
from minisgl.models.config import ROPE_FIELDS, ModelConfig
from minisgl.models.llama import LlamaForCausalLM
from minisgl.models.register import build_model
from minisgl.models.weight import random_weights

# Each rope type, at sizes where a tiny model's few pairs fall on both sides of the thresholds.
ROPES = {
    "default": RopeConfig(rope_theta=5000.0),
    "linear": RopeConfig("linear", factor=2.5),
    "llama3": RopeConfig("llama3", factor=8.0, original_max_position_embeddings=64),
    "yarn": RopeConfig("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=8.0),
    "yarn-untruncated": RopeConfig("yarn", factor=4.0, original_max_position_embeddings=64, truncate=False),
    "yarn-mscale": RopeConfig(
        "yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.707, mscale_all_dim=1.0
    ),
    "yarn-attention-factor": RopeConfig(
        "yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=1.3, mscale=0.707, mscale_all_dim=1.0
    ),
}

if TYPE_CHECKING:
    import transformers


def tiny_config(**overrides: Any) -> ModelConfig:
    """Awkward on purpose: grouped heads, hidden ≠ heads × head_dim, no power of two where none is needed."""
    base = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=131,
        hidden_size=36,
        intermediate_size=52,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=10,
        rms_norm_eps=1e-5,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        rope=RopeConfig(),
        eos_token_ids=(2, 7),
        dtype="float32",
    )
    return replace(base, **overrides)


def tiny_model(architecture: str = "LlamaForCausalLM", seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """A decoder with weights large enough that attention and logits are far from uniform, in fp32 on the CPU."""
    model = build_model(tiny_config(architecture=architecture, **overrides))
    random_weights(model, seed, torch.device("cpu"), torch.float32, std=0.3)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):  # all ones would hide a norm whose weight is not applied
            parameter.uniform_(0.5, 1.5, generator=generator)
    return model


def hf_state(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """The model's weights as a Hugging Face checkpoint names them."""
    state: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            if isinstance(module, MergedLinear):
                parent = path.rpartition(".")[0]
                rows = parameter.split(list(module.parts.values()))
                state |= {f"{parent}.{part}.{kind}": row.clone() for part, row in zip(module.parts, rows, strict=True)}
            else:
                state[f"{path}.{kind}"] = parameter.detach().clone()
    return state


def hf_json(config: ModelConfig) -> dict[str, Any]:
    """The config in Hugging Face's JSON form: what `ModelConfig.from_hf` reads."""
    needed, optional = ROPE_FIELDS[config.rope.rope_type]
    rope = {k: v for k, v in asdict(config.rope).items() if k in needed | optional | {"rope_type", "rope_theta"}}
    fields = {
        "architectures": [config.architecture],
        "model_type": "qwen3" if config.architecture == "Qwen3ForCausalLM" else "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "rope_parameters": {k: v for k, v in rope.items() if v is not None},
        "eos_token_id": list(config.eos_token_ids),
        "dtype": config.dtype,
    }
    if config.architecture == "Qwen3ForCausalLM":
        del fields["mlp_bias"]
    return fields


def hf_twin(model: LlamaForCausalLM) -> transformers.PreTrainedModel:
    """transformers' own model with the same config and weights."""
    import transformers  # here, since it takes seconds and most tests need no twin

    config = transformers.AutoConfig.for_model(**hf_json(model.config))
    twin = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    missing, unexpected = twin.load_state_dict(hf_state(model), strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    return twin.eval()
