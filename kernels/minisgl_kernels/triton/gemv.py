"""y = x Wᵀ for a few tokens: every program multiplies some rows of W, whole, with each token. No tensor cores.

With so few tokens a product is a way of reading W once. A program loads all it will read of W before it looks at x, so
that with programmatic dependent launch the weights are on their way while the kernel before still works. The gate of
the MLP, which stands behind one of the products, is computed in the same kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minisgl_kernels.triton import pdl
from minisgl_kernels.triton.cases import CompileCase, each_dtype
from minisgl_kernels.triton.pdl import let_next_start, prefetch, wait_for_previous


class Rows(NamedTuple):
    """How a product is cut, and how its programs are compiled."""

    block_n: int  # rows of W to a program, of the gate and as many of up where there is one
    block_k: int  # columns at once
    num_warps: int


@triton.jit
def load_columns(start, first: tl.constexpr, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns [first, first + BLOCK_K) of the row at start, or of the rows at start [N, 1]; 0 beyond WIDTH."""
    columns = first + tl.arange(0, BLOCK_K)
    if first + BLOCK_K <= WIDTH:
        return tl.load(start + columns)
    else:
        return tl.load(start + columns, mask=columns < WIDTH, other=0.0)


@triton.jit
def gemv_kernel(
    x,  # [TOKENS, WIDTH]
    weight,  # [num_outputs, WIDTH]; GATED: the rows of the gate, then those of up
    out,  # [TOKENS, num_outputs]
    x_row, num_outputs,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Compute BLOCK_N outputs of every token.

    Rows of W beyond the last are the last one again, and not stored: a mask at each load would cost more. Gate and
    up are each rounded to the dtype, as if two kernels followed one another.
    """
    BLOCK_T: tl.constexpr = triton.next_power_of_2(TOKENS)
    outputs, tokens = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_T)
    w_rows = weight + (tl.minimum(outputs, num_outputs - 1).to(tl.int64) * WIDTH)[:, None]  # [BLOCK_N, 1]
    up_rows = w_rows + num_outputs * tl.full([], WIDTH, tl.int64)
    let_next_start(PDL)
    if PDL and WIDTH > BLOCK_K:
        LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
        MOST_LINES: tl.constexpr = triton.next_power_of_2((WIDTH + LINE - 1) // LINE)
        lines = tl.minimum(tl.arange(0, MOST_LINES) * LINE, WIDTH - 1)
        prefetch(w_rows + lines)
        if GATED:
            prefetch(up_rows + lines)
    w = load_columns(w_rows, 0, WIDTH, BLOCK_K)  # [BLOCK_N, BLOCK_K]
    if GATED:
        w_up = load_columns(up_rows, 0, WIDTH, BLOCK_K)
    wait_for_previous(PDL)

    y = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for first in tl.static_range(0, WIDTH, BLOCK_K):
        if first > 0:
            w = load_columns(w_rows, first, WIDTH, BLOCK_K)
            if GATED:
                w_up = load_columns(up_rows, first, WIDTH, BLOCK_K)
        for t in tl.static_range(TOKENS):
            given = load_columns(x + t * x_row, first, WIDTH, BLOCK_K)  # [BLOCK_K]
            x32 = given.to(tl.float32)[None, :]
            is_token = (tokens == t)[None, :]
            y += tl.where(is_token, tl.sum(w.to(tl.float32) * x32, axis=1)[:, None], 0.0)
            if GATED:
                up += tl.where(is_token, tl.sum(w_up.to(tl.float32) * x32, axis=1)[:, None], 0.0)
    to = out + tokens[None, :].to(tl.int64) * num_outputs + outputs[:, None]
    inside = (outputs < num_outputs)[:, None] & (tokens < TOKENS)[None, :]
    tl.store(to, gated(y, up, out.dtype.element_ty, GATED), mask=inside)


@triton.jit
def gated(y, up, DTYPE: tl.constexpr, GATED: tl.constexpr):
    """y rounded to the dtype; or silu(y) · up, each of the two rounded first, as `silu_and_mul` finds them."""
    y = y.to(DTYPE)
    if GATED:
        y32 = y.to(tl.float32)
        y = (y32 / (1.0 + tl.exp(-y32))).to(DTYPE) * up.to(DTYPE)
    return y


def gemv(x: torch.Tensor, weight: torch.Tensor, rows: Rows, is_gated: bool = False) -> torch.Tensor:
    """x Wᵀ of x [T, width], for a few tokens, and weight [outputs, width], contiguous.

    With is_gated silu(x Wgᵀ) · (x Wuᵀ) of the halves of weight. Each T is a kernel of its own.
    """
    tokens, width = x.shape
    outputs = len(weight) // (1 + is_gated)
    out = x.new_empty(tokens, outputs)
    gemv_kernel[triton.cdiv(outputs, rows.block_n),](
        x, weight, out, x.stride(0), outputs, tokens, width, rows.block_n, rows.block_k, is_gated,
        num_warps=rows.num_warps, **pdl.overlap(gemv_kernel, x.device),
    )  # fmt: skip
    return out


_TYPES = {"x": "*", "weight": "*", "out": "*", "x_row": "i32/16", "num_outputs": "i32/16"}
COMPILE_CASES = [
    CompileCase(
        gemv_kernel,
        types,
        {"WIDTH": width, "BLOCK_K": 1024, "TOKENS": tokens, "BLOCK_N": 8, "GATED": is_gated, "PDL": pdl_on},
        num_warps=4,
        min_sm=90 if pdl_on else 80,
    )
    for pdl_on in (False, True)
    for types in each_dtype(_TYPES)
    if types["x"] != "*fp32"
    for width, tokens, is_gated in ((1024, 1, False), (1024, 2, True), (3072, 3, False))
]
