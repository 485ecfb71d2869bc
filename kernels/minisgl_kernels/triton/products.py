"""The products of a decoder with its weights, and which kernel computes which.

Few tokens: each weight is read for a few multiplications, and what counts is how fast it is read; our kernels do that.
Many: what counts is arithmetic, and torch's library (cuBLAS) does it. Where the change is was measured on an H200 with
the products of Qwen3-0.6B (chapter 8); products of other models take what the nearest of those in size took. In fp32,
with a bias and on GPUs before sm_80 all products are torch's.

Our kernels may read weights while the kernel before still runs: a weight that was just written needs a
`torch.cuda.synchronize()` before it is multiplied with.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
import triton

from minisgl_kernels.triton.activation import silu_and_mul
from minisgl_kernels.triton.cases import has_large_memory, is_small, refuse, require
from minisgl_kernels.triton.gemv import Rows, gemv
from minisgl_kernels.triton.skinny import Tile, product

MOST_TOKENS = 64  # beyond them every product is torch's
LARGE, HUGE = 5 << 20, 64 << 20  # elements of a weight: more than qkv's of Qwen3-0.6B; as many as only a head's


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """See `reference.linear`.

    Raises:
        RuntimeError: the first call that splits a product is captured in a CUDA graph.
    """
    ours = _ours(x, weight, bias, False)
    return F.linear(x, weight, bias) if ours is None else ours


def linear_silu_mul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """See `reference.linear_silu_mul`: one kernel for few tokens, else two.

    Raises:
        ValueError: an odd number of rows, or what `cases.require` refuses.
        RuntimeError: as `linear`.
    """
    require("linear_silu_mul", x, weight)
    if len(weight) % 2:
        refuse("linear_silu_mul", f"{len(weight)} rows do not halve into gate and up")
    ours = _ours(x, weight, bias, True)
    return silu_and_mul(F.linear(x, weight, bias)) if ours is None else ours


@functools.cache
def kernel_for(tokens: int, outputs: int, width: int, is_gated: bool = False) -> Rows | Tile | None:
    """How a product of so many tokens is cut, for gemv or for product; None where torch is faster.

    outputs are those of the op: a gated weight [2 · outputs, width] has twice as many rows.
    """
    size = outputs * width * (1 + is_gated)
    is_wide = width >= outputs and not is_gated  # few outputs: torch splits columns too, in two kernels
    if not 1 <= tokens <= (MOST_TOKENS if size >= HUGE and not is_gated else 32 if is_wide else 16):
        return None
    if tokens <= (2 if size > LARGE else 4):
        return rows_for(tokens, width, is_gated)
    return tile_for(tokens, outputs, width, is_gated)


def rows_for(tokens: int, width: int, is_gated: bool = False) -> Rows:
    """Of gemv: 16 KB of weights to a program, in fewer rows if each row is multiplied with several tokens."""
    block_k = min(4096, triton.next_power_of_2(width))
    block_n = min(8 if tokens == 1 else 4, 8192 // block_k // (1 + is_gated))
    return Rows(block_n, block_k, 4 if block_k > 2048 else 2)


def tile_for(tokens: int, outputs: int, width: int, is_gated: bool = False) -> Tile:
    """Of product: splits until there are some 400 programs, each of which still has two blocks of columns or more."""
    block_t = max(16, min(64, triton.next_power_of_2(tokens)))
    block_n, block_k, num_stages = (32 if is_gated else 64), 128, 4 if block_t <= 32 else 3
    tiles = triton.cdiv(outputs, block_n) * triton.cdiv(tokens, block_t)
    if block_t == 16 and tiles <= 256 and not is_gated:
        block_k, num_stages = 256, 3
    most = max(1, min(width // (2 * block_k), 400 // tiles, 8))
    blocks = triton.cdiv(width, block_k)
    splits = next((n for n in range(most, most // 2, -1) if blocks % n == 0), most)  # equal shares need no masks
    return Tile(block_n, block_t, block_k, splits, 4, num_stages)


def _ours(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, is_gated: bool) -> torch.Tensor | None:
    """The product by our kernels; None if torch shall compute it."""
    if bias is not None or x.dim() != 2 or len(x) > MOST_TOKENS or x.dtype not in (torch.half, torch.bfloat16):
        return None
    if x.stride(1) != 1 or not weight.is_contiguous() or is_small(x.device):
        return None
    kernel = kernel_for(len(x), len(weight) // (1 + is_gated), weight.shape[1], is_gated)
    if isinstance(kernel, Tile):
        if not has_large_memory(x.device):
            kernel = kernel._replace(num_stages=kernel.num_stages - 1)
        return product(x, weight, kernel, is_gated)
    return None if kernel is None else gemv(x, weight, kernel, is_gated)
