"""y = x Wᵀ for a few tokens: every program multiplies some rows of W, whole, with each token. No tensor cores.

With so few tokens a product is a way of reading W once. A program loads all it will read of W before it looks at x, so
that with programmatic dependent launch the weights are on their way while the kernel before still works. What stands
before or behind the product in a decoder layer is done in the same kernel: the addition to the residual stream and
RMSNorm by each program for itself, which costs less than a launch, and the gate of the MLP.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl_kernels.triton import pdl
from minisgl_kernels.triton.cases import CompileCase, each_dtype
from minisgl_kernels.triton.pdl import let_next_start, prefetch, wait_for_previous

MOST_NORMED = 8192  # elements of a row that a program normalises: it holds them all at once


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
    x, residual,  # [TOKENS, WIDTH]; residual may be None
    norm_weight,  # [WIDTH], or None: x as it is
    weight,  # [num_outputs, WIDTH]; GATED: the rows of the gate, then those of up
    out,  # [TOKENS, num_outputs]
    total_out,  # [TOKENS, WIDTH], x + residual; None without a residual
    x_row, residual_row, num_outputs, eps,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Compute BLOCK_N outputs of every token.

    Rows of W beyond the last are the last one again, and not stored: a mask at each load would cost more. The rounding
    is that of the ops one after another: sum, norm, gate and up are each rounded to the dtype.
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
    if norm_weight is not None:
        gain = load_columns(norm_weight, 0, WIDTH, BLOCK_K)  # [BLOCK_K]
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
            if residual is not None:
                kept = load_columns(residual + t * residual_row, first, WIDTH, BLOCK_K)
                given = (kept.to(tl.float32) + given.to(tl.float32)).to(given.dtype)
                if tl.program_id(0) == 0:
                    columns = tl.arange(0, BLOCK_K)
                    tl.store(total_out + t * WIDTH + columns, given, mask=columns < WIDTH)
            if norm_weight is not None:
                x32 = given.to(tl.float32)
                inverse_rms = tl.rsqrt(tl.sum(x32 * x32, axis=0) / WIDTH + eps)
                given = (x32 * inverse_rms).to(given.dtype) * gain
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


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    block_n: int,
    block_k: int,
    num_warps: int,
    is_gated: bool = False,
    norm: tuple[torch.Tensor | None, torch.Tensor, float] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x Wᵀ of x [T, width], for a few tokens; (y, total), see `linear.add_rms_norm_linear`.

    Args:
        weight: [outputs, width], contiguous; with is_gated the rows of the gate and those of up behind one another.
        block_n: outputs of a program.
        block_k: columns that it loads at once, at least width where a norm comes first.
        norm: residual or None, weight of the norm, and eps: what happens to x before the product.
    """
    tokens, width = x.shape
    outputs = len(weight) // (1 + is_gated)
    residual, norm_weight, eps = norm or (None, None, 0.0)
    out = x.new_empty(tokens, outputs)
    total = x if residual is None else torch.empty_like(residual)
    gemv_kernel[triton.cdiv(outputs, block_n),](
        x, residual, norm_weight, weight, out, None if residual is None else total,
        x.stride(0), 0 if residual is None else residual.stride(0), outputs, eps,
        tokens, width, block_n, block_k, is_gated, num_warps=num_warps, **pdl.overlap(gemv_kernel, x.device),
    )  # fmt: skip
    return out, total


_TYPES = {"x": "*", "weight": "*", "out": "*", "x_row": "i32/16", "residual_row": "i32/16"}
_TYPES |= {"num_outputs": "i32/16", "eps": "fp32"}
_NORM = {"residual": "*", "norm_weight": "*", "total_out": "*"}
_PLAIN = dict.fromkeys(_NORM)
COMPILE_CASES = [
    CompileCase(
        gemv_kernel, types, constants | {"TOKENS": tokens, "BLOCK_N": 8, "GATED": is_gated, "PDL": pdl_on},
        num_warps=4, min_sm=90 if pdl_on else 80,
    )
    for pdl_on in (False, True)
    for normed in (_TYPES, _TYPES | _NORM)
    for types in each_dtype(normed) if "*fp32" not in types.values()
    for tokens, is_gated in ((1, False), (3, True))
    for constants in [{"WIDTH": 1024, "BLOCK_K": 1024} if normed is not _TYPES
                      else _PLAIN | {"WIDTH": 3072, "BLOCK_K": 1024}]
]  # fmt: skip
