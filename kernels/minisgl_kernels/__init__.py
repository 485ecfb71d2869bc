"""The engine's numerical ops. `reference` holds each in plain torch: the oracle, and what runs everywhere.

Other implementations have the same names and arguments: `cpu` (C++ for a CPU), `triton` and `cuda` (for NVIDIA GPUs,
imported when they are chosen).
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from minisgl_kernels import cpu, reference
from minisgl_kernels.reference import apply_rope, attend, causal_attention, rms_norm, silu_and_mul

__all__ = ["apply_rope", "attend", "causal_attention", "rms_norm", "silu_and_mul"]
__all__ += ["choose", "cpu", "implementation", "reference", "why_not"]

# The module of each implementation of the layers' ops; one that lies elsewhere is named without a dot.
IMPLEMENTATIONS = {"torch": ".reference", "cpp": ".cpu", "triton": ".triton"}
_AUTO = {"cuda": ("triton", "torch"), "cpu": ("cpp", "torch")}  # the first that runs
# The packages of each that may be missing; cuda has Triton attend over chunks.
_NEEDS: dict[str, tuple[str, ...]] = {"cpp": (), "triton": ("triton",), "cuda": ("cuda.core", "triton")}
_NEEDS |= {"flash_attn": ("flash_attn",)}


def implementation(name: str, decode_kernels: bool = False) -> Any:
    """The module of ops of this name: torch, cpp or triton; with decode_kernels, products for few tokens if it has
    any."""
    module = ".triton.decode_ops" if decode_kernels and name == "triton" else IMPLEMENTATIONS[name]
    return import_module(module, __name__)


def choose(choice: str, device: torch.device, dtype: torch.dtype) -> str:
    """The implementation to use for a choice of torch, cpp, triton, cuda, flash_attn or auto (the best that runs).

    Raises:
        ValueError: it cannot be used here; the message says why and what can.
    """
    automatic = next(name for name in _AUTO.get(device.type, ("torch",)) if not why_not(name, device, dtype))
    if choice == "auto":
        return automatic
    if reason := why_not(choice, device, dtype):
        raise ValueError(f"{choice} cannot be used on {device} in {dtype}: {reason}; {automatic} can")
    return choice


def why_not(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """Why an implementation cannot be used for tensors of this device and dtype; empty if it can."""
    if name not in _NEEDS:  # torch, and what somebody has added
        return ""
    if name == "cpp":
        fits = device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
        return cpu.why_unavailable() if fits else "it is for a CPU, in float32 or bfloat16"
    if missing := [package for package in _NEEDS[name] if not _installed(package)]:
        return f"the package {missing[0].replace('.', '-').replace('_', '-')} is not installed"
    if name == "flash_attn":
        fits = device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)
        return "" if fits else "it is for a GPU, in float16 or bfloat16"
    reason: str = import_module(f"minisgl_kernels.{name}").why_unavailable(device, dtype)
    return reason


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of the package around it
        return False
