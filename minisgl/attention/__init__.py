"""Attention over the paged pool: one module a backend, imported when it is chosen."""

from importlib import import_module
from typing import Any

BACKENDS = {
    "torch": "torch_backend:TorchAttention",
    "cpp": "cpp_backend:CppAttention",
    "triton": "triton_backend:TritonAttention",
    "cuda": "cuda_backend:CudaAttention",
    "flash_attn": "flash_attn:FlashAttention",
}


def backend(name: str) -> Any:
    """The class of a backend, made anew for each step from a pool, the step's rows and the work counts."""
    module, _, symbol = BACKENDS[name].partition(":")
    return getattr(import_module(f"minisgl.attention.{module}"), symbol)
