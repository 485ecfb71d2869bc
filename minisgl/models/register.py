"""Which class decodes which architecture."""

from functools import partial
from typing import Any, cast

import torch
from minisgl_kernels import reference

from minisgl.distributed.comm import ALONE, Comm, SummingComm, Unsummed
from minisgl.layers.attention import Attention
from minisgl.layers.norm import RMSNorm, SummingNorm
from minisgl.models.config import ModelConfig
from minisgl.models.llama import LlamaForCausalLM, NewNorm
from minisgl.models.qwen3 import Qwen3ForCausalLM

MODELS: dict[str, type[LlamaForCausalLM]] = {model.__name__: model for model in (LlamaForCausalLM, Qwen3ForCausalLM)}


def build_model(
    config: ModelConfig,
    ops: Any = reference,
    attention: type[Attention] = Attention,
    comm: Comm = ALONE,
    sums_in_norms: bool = False,
) -> LlamaForCausalLM:
    """The config's decoder on the meta device: shapes without memory, for `models.weight` to fill.

    Args:
        ops: the implementation of the layers' ops, a module of minisgl_kernels.
        attention: the class of the attention layers; FusedAttention asks for a backend that reads K and V in place.
        comm: the rank's end of its group; the decoder has the rank's part of each layer.
        sums_in_norms: sums over the ranks are taken by the norm behind each layer, which needs a SummingComm.

    Raises:
        ValueError: the config's heads or MLP do not divide by the size of the group.
    """
    norm: NewNorm = RMSNorm
    if sums_in_norms:
        norm, comm = partial(SummingNorm, comm=cast(SummingComm, comm)), Unsummed(comm)
    with torch.device("meta"):
        model = MODELS[config.architecture](config, attention, comm, norm)
    for module in model.modules():
        if hasattr(module, "ops"):
            module.ops = ops
    return model
