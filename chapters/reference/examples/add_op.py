"""An op of your own: a sum and the norm behind it, in Triton where that runs, and by torch's own norm elsewhere.

    python chapters/reference/examples/add_op.py "Once upon a time"

The module holds every op that the layers call, under the names of `reference` and with its arguments. One is ours.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from minisgl_kernels import IMPLEMENTATIONS, reference, why_not
from minisgl_kernels.reference import *  # noqa: F403  the ops that are not ours
from minisgl_kernels.registry import register_op

from minisgl import LLM, EngineConfig

if find_spec("triton"):  # macOS and Windows have none
    import triton
    import triton.language as tl

    @triton.jit
    def add_rms_norm_kernel(x, residual, weight, normed, total, eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
        """One row a program. What lies beyond HIDDEN is read as 0, which adds nothing, and is not written."""
        column = tl.arange(0, BLOCK)
        inside = column < HIDDEN
        place = tl.program_id(0).to(tl.int64) * HIDDEN + column
        added = tl.load(x + place, mask=inside, other=0.0)
        kept = tl.load(residual + place, mask=inside, other=0.0)
        sum32 = (kept.to(tl.float32) + added.to(tl.float32)).to(added.dtype).to(tl.float32)  # rounded as it is kept
        inverse_rms = tl.rsqrt(tl.sum(sum32 * sum32, axis=0) / HIDDEN + eps)
        gain = tl.load(weight + column, mask=inside, other=0.0)
        tl.store(total + place, sum32.to(added.dtype), mask=inside)
        tl.store(normed + place, (sum32 * inverse_rms).to(added.dtype) * gain, mask=inside)


def random_inputs(shape: Any, device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> list[Any]:
    """What the check calls both sides with. Never constants, which hide a sum that goes wrong."""
    hidden = shape["hidden"]
    x, residual = torch.randn(2, shape["rows"], hidden, device=device, generator=generator).to(dtype)
    return [x, residual, torch.randn(hidden, device=device, generator=generator).to(dtype), 1e-5]


@register_op(
    "add_rms_norm",
    reference=reference.add_rms_norm,
    shapes=[{"rows": 1, "hidden": 576}, {"rows": 37, "hidden": 100}],  # 100 is no power of two
    inputs=random_inputs,
)
def checked(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best that runs here; the first call on a device and dtype is preceded by the check."""
    if not _triton_runs(x.device, x.dtype):
        return F.rms_norm(residual + x, weight.shape, weight, eps), residual + x
    x, residual = x.contiguous(), residual.contiguous()
    normed, total = torch.empty_like(x), torch.empty_like(x)
    rows, hidden = x.flatten(0, -2).shape
    add_rms_norm_kernel[rows,](x, residual, weight, normed, total, eps, hidden, triton.next_power_of_2(hidden))
    return normed, total


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Takes the place of reference.add_rms_norm in this module. The first layer has no residual yet."""
    if residual is None:
        return reference.add_rms_norm(x, None, weight, eps)
    return checked(x, residual, weight, eps)


@cache
def _triton_runs(device: torch.device, dtype: torch.dtype) -> bool:
    return not why_not("triton", device, dtype)


def register() -> None:
    """Let `kernels="mine"` choose this module."""
    IMPLEMENTATIONS["mine"] = __name__


if __name__ == "__main__":
    register()
    with LLM(EngineConfig(kernels="mine")) as llm:
        print(llm.generate(sys.argv[1])[0].text)
