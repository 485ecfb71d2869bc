"""Which class decodes which architecture."""

from __future__ import annotations

import torch

from minisgl.models.config import ModelConfig
from minisgl.models.llama import LlamaForCausalLM
from minisgl.models.qwen3 import Qwen3ForCausalLM

MODELS: dict[str, type[LlamaForCausalLM]] = {model.__name__: model for model in (LlamaForCausalLM, Qwen3ForCausalLM)}


def build_model(config: ModelConfig) -> LlamaForCausalLM:
    """The config's decoder on the meta device: shapes without memory, for `models.weight` to fill."""
    with torch.device("meta"):
        return MODELS[config.architecture](config)
