"""What the Triton modules share: the check of their arguments, and the description of a kernel to compile ahead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from minisgl_kernels.triton.available import why_unavailable

DTYPES = ("fp32", "fp16", "bf16")


@dataclass(frozen=True)
class CompileCase:
    """One kernel at one set of types and constants, which `minisgl_kernels.triton.compile` compiles without a GPU.

    Args:
        kernel: the `@triton.jit` function.
        types: of each argument that is no constant, such as "*bf16", "i64" or "fp32". "/16" behind an integer
            promises a multiple of 16, as Triton finds out at a launch; a pointer always is one.
        constants: of the rest, None for a tensor that is left out.
        min_sm: no compilation for an older architecture; bf16 needs sm_80 in any case.
    """

    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    min_sm: int = 75

    @property
    def name(self) -> str:
        """For people: the kernel, the types of its pointers and its constants."""
        pointers = sorted({kind[1:] for kind in self.types.values() if kind.startswith("*")})
        constants = [f"{name}={value}" for name, value in self.constants.items()]
        return f"{self.kernel.__name__}[{' '.join(pointers + constants)}]"

    def runs_on(self, sm: int) -> bool:
        """Whether a GPU of this architecture, 90 for sm_90, is meant to run it."""
        return sm >= self.min_sm and (sm >= 80 or "*bf16" not in self.types.values())


def each_dtype(types: dict[str, str]) -> Iterator[dict[str, str]]:
    """The same types once for each dtype of the engine, which stands in place of "*" alone."""
    for dtype in DTYPES:
        yield {name: f"*{dtype}" if kind == "*" else kind for name, kind in types.items()}


def require(op: str, first: torch.Tensor, *others: torch.Tensor | None, switch: str = "kernels") -> None:
    """Check what all kernels need: a device and dtype that Triton runs, the same for all; last dimensions unstrided.

    Raises:
        ValueError: naming the op, the reason and the fallback.
    """
    reason = _why_unavailable(first.device, first.dtype)
    for tensor in (first, *others):
        if tensor is None:
            continue
        if tensor.dtype != first.dtype or tensor.device != first.device:
            reason = reason or f"{first.dtype} on {first.device} beside {tensor.dtype} on {tensor.device}"
        if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
            reason = reason or f"the last dimension has stride {tensor.stride(-1)}, not 1"
    if reason:
        refuse(op, reason, switch)


def refuse(op: str, reason: str, switch: str = "kernels") -> None:
    """Raise the ValueError of an op that Triton does not compute, and name the switch that chooses torch."""
    raise ValueError(f"{op} in Triton: {reason}; use --{switch} torch")


@cache
def is_small(device: torch.device) -> bool:
    """Whether a GPU is older than sm_80: 64 KB of shared memory, and no asynchronous copies into it."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)


@cache
def has_large_memory(device: torch.device) -> bool:
    """Whether a program may have 160 KB of shared memory: on sm_80, 90 and 100, not on sm_86, 89 and 120 with 99 KB."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return capability == (8, 0) or capability[0] in (9, 10)


_why_unavailable = cache(why_unavailable)
