"""Programmatic dependent launch: a kernel starts while the one before it still runs, and waits for its results.

Between two kernels of a graph the GPU stands still for about a microsecond: the first must end before the second is
set up. From sm_90 on, a kernel can be let in early, when every program of the one before has said so; it prepares
itself, reads what nobody writes (weights), and waits before it touches anything else. Every program of every kernel
waits, whether it then has work or not: so a kernel that is over knows that all before it are over too.
Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from minisgl_kernels.launches import may_overlap


def overlap(kernel: Any, device: torch.device) -> dict[str, bool]:
    """What a launch of this kernel adds to its arguments: nothing where launches may not overlap (minisgl_kernels.
    launches), where the GPU cannot, or where the kernel never waits."""
    return {"PDL": True, "launch_pdl": True} if may_overlap() and _can_overlap(device) and _waits(kernel) else {}


@cache
def _can_overlap(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def _waits(kernel: Any) -> bool:
    return "wait_for_previous(PDL)" in kernel.src


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Let the next kernel in as soon as all programs of this one run and leave it room, if not done by the wait."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until the kernel before is over and what it wrote is seen, having let the next one in.

    A kernel calls it in every program, before any access to memory but reads of constants.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(pointers):
    """Ask for the lines of 128 bytes at these pointers, which will be in the L2 cache when they are read."""
    addresses = pointers.to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
    )
