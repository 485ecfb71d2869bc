"""The products of a decoder with its weights, and what stands next to them: which kernel computes which.

Few tokens: each weight is read for a few multiplications, and what counts is how fast it is read; our kernels do that.
Many: what counts is arithmetic, and torch's library (cuBLAS) does it. Where the change is was measured on an H200; see
chapter 8. In fp32, with a bias and on GPUs before sm_80 all products are torch's.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
import triton

from minisgl_kernels.triton.activation import silu_and_mul
from minisgl_kernels.triton.cases import is_small, refuse, require
from minisgl_kernels.triton.gemv import MOST_NORMED, gemv
from minisgl_kernels.triton.norm import add_rms_norm
from minisgl_kernels.triton.skinny import Tile, product

GEMV_TOKENS = 4  # up to here without tensor cores
MOST_TOKENS = 256  # up to here with our kernels


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """See `reference.linear`.

    Raises:
        RuntimeError: the first call that splits a product is captured in a CUDA graph.
    """
    return _product(x, weight, False) if _is_ours(x, weight, bias) else F.linear(x, weight, bias)


def linear_silu_mul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """See `reference.linear_silu_mul`. Raises as `linear`, and ValueError for what `cases.require` refuses."""
    _check_gated("linear_silu_mul", x, weight)
    if _is_ours(x, weight, bias):
        return _product(x, weight, True)
    return silu_and_mul(F.linear(x, weight, bias))


def add_rms_norm_linear(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.add_rms_norm_linear`. Raises as `linear` and `add_rms_norm`."""
    if _is_one_kernel(x, residual, norm_weight, weight, bias):
        return gemv(x, weight, *gemv_blocks(len(weight), weight.shape[1], False), False, (residual, norm_weight, eps))
    normed, total = add_rms_norm(x, residual, norm_weight, eps)
    return linear(normed, weight, bias), total


def add_rms_norm_linear_silu_mul(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.add_rms_norm_linear_silu_mul`. Raises as `linear_silu_mul` and `add_rms_norm`."""
    _check_gated("add_rms_norm_linear_silu_mul", x, weight)
    if _is_one_kernel(x, residual, norm_weight, weight, bias):
        blocks = gemv_blocks(len(weight) // 2, weight.shape[1], True)
        return gemv(x, weight, *blocks, True, (residual, norm_weight, eps))
    normed, total = add_rms_norm(x, residual, norm_weight, eps)
    return linear_silu_mul(normed, weight, bias), total


def gemv_blocks(outputs: int, width: int, is_gated: bool) -> tuple[int, int, int]:
    """Outputs of a program, columns at once, and warps, of gemv: about 16 KB of weights to a program."""
    block_k = triton.next_power_of_2(width) if width <= MOST_NORMED else 2048
    block_n = max(1, min(16, 8192 // block_k)) // (1 + is_gated)
    return max(1, block_n), block_k, 8 if block_k > 4096 else 4


@functools.cache
def tile_for(tokens: int, outputs: int, width: int) -> Tile:
    """How the product of so many tokens is cut: until there are two programs for each multiprocessor of an H200."""
    block_t = max(16, min(128, triton.next_power_of_2(tokens)))
    block_n, block_k, num_stages = (64, 128, 4) if block_t <= 32 else (64, 64, 4)
    tiles = triton.cdiv(outputs, block_n) * triton.cdiv(tokens, block_t)
    splits = max(1, min(264 // tiles, width // 256, 8))
    return Tile(block_n, block_t, block_k, splits, 4, num_stages)


def _product(x: torch.Tensor, weight: torch.Tensor, is_gated: bool) -> torch.Tensor:
    outputs, width = len(weight) // (1 + is_gated), weight.shape[1]
    if len(x) <= GEMV_TOKENS:
        return gemv(x, weight, *gemv_blocks(outputs, width, is_gated), is_gated)[0]
    return product(x, weight, tile_for(len(x), outputs, width), is_gated)


def _is_ours(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether our kernels take this product, which torch takes otherwise."""
    if (
        bias is not None
        or x.dim() != 2
        or not 1 <= len(x) <= MOST_TOKENS
        or x.dtype not in (torch.half, torch.bfloat16)
    ):
        return False
    return x.stride(1) == 1 and weight.is_contiguous() and not is_small(x.device)


def _is_one_kernel(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> bool:
    """Whether each program of a product shall normalise x for itself."""
    if not _is_ours(x, weight, bias) or len(x) > GEMV_TOKENS or x.shape[1] > MOST_NORMED:
        return False
    require("add_rms_norm_linear", x, residual, norm_weight, weight)
    if residual is not None and residual.shape != x.shape:
        refuse("add_rms_norm_linear", f"x is {list(x.shape)} and the residual {list(residual.shape)}")
    return True


def _check_gated(op: str, x: torch.Tensor, weight: torch.Tensor) -> None:
    require(op, x, weight)
    if len(weight) % 2:
        refuse(op, f"{len(weight)} rows do not halve into gate and up")
