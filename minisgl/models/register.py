"""Which class decodes which architecture."""

import torch
import torch.nn.functional as F

from minisgl.layers.embedding import Embedding
from minisgl.layers.linear import Linear, Product
from minisgl.models.config import ModelConfig
from minisgl.models.llama import LlamaForCausalLM
from minisgl.models.qwen3 import Qwen3ForCausalLM

MODELS: dict[str, type[LlamaForCausalLM]] = {model.__name__: model for model in (LlamaForCausalLM, Qwen3ForCausalLM)}


def build_model(config: ModelConfig, product: Product = F.linear) -> LlamaForCausalLM:
    """The config's decoder on the meta device: shapes without memory, for `models.weight` to fill.

    Args:
        product: what computes the matrix products of all linear layers.
    """
    with torch.device("meta"):
        model = MODELS[config.architecture](config)
    for module in model.modules():
        if isinstance(module, Linear | Embedding):
            module.product = product
    return model
