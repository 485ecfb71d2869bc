"""From a config to a model and its engine."""

from pathlib import Path

import minisgl_kernels as ops
import torch

from minisgl.attention import backend
from minisgl.attention.in_place import InPlaceAttention
from minisgl.config import EngineConfig
from minisgl.distributed.comm import ALONE, Comm
from minisgl.engine.engine import Engine
from minisgl.engine.serial import SerialEngine
from minisgl.layers.attention import Attention, FusedAttention
from minisgl.models.config import ModelConfig
from minisgl.models.llama import LlamaForCausalLM
from minisgl.models.register import build_model
from minisgl.models.weight import iter_weights, load_weights, random_weights


def build_engine(config: EngineConfig, folder: Path, device: torch.device) -> Engine:
    """An engine on a device, in this process alone. Arguments and errors as of load_model."""
    model = load_model(config, folder, device)
    return Engine(model, config) if config.kv_cache == "paged" else SerialEngine(model, config)


def load_model(config: EngineConfig, folder: Path, device: torch.device, comm: Comm = ALONE) -> LlamaForCausalLM:
    """The model on a device, or this rank's shard of it, with the layers and ops that the config chooses.

    Args:
        folder: the checkpoint, or what there is of it: random weights need its config only.

    Raises:
        ValueError: the model is unsupported or damaged, or the config does not fit it.
    """
    model_config = ModelConfig.from_folder(folder)
    dtype = _dtype(config.dtype, model_config.dtype, device)
    kernels, attention = (ops.choose(c, device, dtype) for c in (config.kernels, config.attention))
    in_place = config.kv_cache == "paged" and issubclass(backend(attention), InPlaceAttention)
    layer = FusedAttention if kernels == "triton" and in_place else Attention
    layer_ops = ops.implementation(kernels, config.decode_kernels == "auto")
    model = build_model(model_config, layer_ops, layer, comm, config.custom_all_reduce)
    if config.random_weights:
        random_weights(model, config.weight_seed, device, dtype)
    else:
        load_weights(model, iter_weights(folder), device, dtype)
    return model


def choose_device(name: str) -> torch.device:
    """The device of this name; auto is a CUDA GPU if there is one.

    Raises:
        ValueError: it cannot be used.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device  # touches the device: a missing one fails here, not in a layer
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None


def _dtype(name: str, checkpoint: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        name = checkpoint
        if device.type == "cpu":
            name = "float32"  # bf16 flips close choices, and torch's 16-bit products are no faster there
        elif name == "bfloat16" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
            name = "float16"
    return getattr(torch, name)
