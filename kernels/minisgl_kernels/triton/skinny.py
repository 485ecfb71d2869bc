"""y = x Wᵀ on tensor cores for the tokens of a decode batch, a few to a few hundred.

The rows of W are the rows of a program's tile, of which tensor cores want many, and the tokens its columns, of which
they take as few as 8. Few tokens leave few tiles; then the columns of W are split between programs too, so that enough
of them read at a time, and the program that comes last adds what the others left. That sum has a fixed order: the
result is the same in every run.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minisgl_kernels.triton import pdl
from minisgl_kernels.triton.cases import CompileCase, each_dtype
from minisgl_kernels.triton.decode import is_last
from minisgl_kernels.triton.gemv import gated
from minisgl_kernels.triton.pdl import let_next_start, prefetch, wait_for_previous

MOST_TILES = 16_384  # that share their columns between programs, each with a counter
MOST_AHEAD = tl.constexpr(32 * 1024)  # weights that a program asks for before it waits: of all, half of the L2 cache
MOST_AT_ONCE = 528  # programs: four to a multiprocessor of an H200


class Tile(NamedTuple):
    """How a product is cut, and how its programs are compiled."""

    block_n: int  # rows of W, of the gate and as many of up where there is one
    block_t: int  # tokens
    block_k: int  # columns at a time
    splits: int  # programs that share the columns
    num_warps: int
    num_stages: int


@triton.jit
def load_tile(rows, first, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr):
    """Columns [first, first + BLOCK_K) of the rows that begin at rows [R, 1]; 0 beyond WIDTH, which EVEN excludes."""
    columns = first + tl.arange(0, BLOCK_K)[None, :]
    if EVEN:
        return tl.load(rows + columns)
    else:
        return tl.load(rows + columns, mask=columns < WIDTH, other=0.0)


@triton.jit(do_not_specialize=["num_tokens"])
def product_kernel(
    x,  # [num_tokens, WIDTH]
    weight,  # [num_outputs, WIDTH]; GATED: the rows of the gate, then those of up
    out,  # [num_tokens, num_outputs]
    partials,  # [tiles, SPLITS, 1 or 2, BLOCK_T, BLOCK_N] fp32, and
    arrivals,  # [tiles] int32 of zeros: both used if SPLITS > 1
    x_row, num_tokens, num_outputs,
    WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """One program: BLOCK_N outputs of BLOCK_T tokens, summed over one split of the columns.

    Rows beyond the last, of W and of x, are the last one again, and not stored.
    """
    SPLIT_LEN: tl.constexpr = (WIDTH + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS) * BLOCK_K
    EVEN: tl.constexpr = SPLIT_LEN * SPLITS == WIDTH
    tile_t, tile_n, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tokens, outputs = tile_t * BLOCK_T + tl.arange(0, BLOCK_T), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = x + (tl.minimum(tokens, num_tokens - 1).to(tl.int64) * x_row)[:, None]  # [BLOCK_T, 1]
    w_rows = weight + (tl.minimum(outputs, num_outputs - 1).to(tl.int64) * WIDTH)[:, None]  # [BLOCK_N, 1]
    up_rows = w_rows + num_outputs * tl.full([], WIDTH, tl.int64)
    let_next_start(PDL)
    if PDL:
        LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
        AHEAD: tl.constexpr = min(SPLIT_LEN, MOST_AHEAD // ((1 + GATED) * BLOCK_N))
        MOST_LINES: tl.constexpr = triton.next_power_of_2((AHEAD + LINE - 1) // LINE)
        lines = tl.minimum(split * SPLIT_LEN + tl.minimum(tl.arange(0, MOST_LINES) * LINE, AHEAD - 1), WIDTH - 1)
        prefetch(w_rows + lines[None, :])
        if GATED:
            prefetch(up_rows + lines[None, :])
    wait_for_previous(PDL)

    y = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for start in range(0, SPLIT_LEN, BLOCK_K):
        first = split * SPLIT_LEN + start
        w = load_tile(w_rows, first, WIDTH, BLOCK_K, EVEN)  # [BLOCK_N, BLOCK_K]
        xt = tl.trans(load_tile(x_rows, first, WIDTH, BLOCK_K, EVEN))  # [BLOCK_K, BLOCK_T]
        y = tl.dot(w, xt, y)
        if GATED:
            up = tl.dot(load_tile(up_rows, first, WIDTH, BLOCK_K, EVEN), xt, up)

    y, up = tl.trans(y), tl.trans(up)  # [BLOCK_T, BLOCK_N], as out has them
    to = out + tokens[:, None].to(tl.int64) * num_outputs + outputs[None, :]
    inside = (tokens < num_tokens)[:, None] & (outputs < num_outputs)[None, :]
    if SPLITS == 1:
        tl.store(to, gated(y, up, out.dtype.element_ty, GATED), mask=inside)
    else:
        tile = tile_n * tl.num_programs(0) + tile_t
        AREA: tl.constexpr = BLOCK_N * BLOCK_T
        inner = tl.arange(0, BLOCK_T)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        parts = partials + (tile.to(tl.int64) * SPLITS) * ((1 + GATED) * AREA) + inner
        mine = parts + split * ((1 + GATED) * AREA)
        tl.store(mine, y)
        if GATED:
            tl.store(mine + AREA, up)
        if is_last(arrivals + tile, SPLITS):
            y, up = tl.zeros_like(y), tl.zeros_like(up)
            for other in tl.static_range(SPLITS):
                y += tl.load(parts + other * ((1 + GATED) * AREA))
                if GATED:
                    up += tl.load(parts + (other * ((1 + GATED) * AREA) + AREA))
            tl.store(to, gated(y, up, out.dtype.element_ty, GATED), mask=inside)


def product(x: torch.Tensor, weight: torch.Tensor, tile: Tile, is_gated: bool = False) -> torch.Tensor:
    """x Wᵀ of x [T, width] and weight [outputs, width], contiguous; with is_gated silu(x Wgᵀ) · (x Wuᵀ) of its halves.

    Launches on one device must follow one another: where columns are split, they share counters.

    Raises:
        RuntimeError: the first call that splits columns is captured in a CUDA graph.
    """
    tokens, width = x.shape
    outputs = len(weight) // (1 + is_gated)
    out = x.new_empty(tokens, outputs)
    grid = triton.cdiv(tokens, tile.block_t), triton.cdiv(outputs, tile.block_n), tile.splits
    partials, arrivals = out, out  # not touched without splits
    if tile.splits > 1:
        area = tile.block_n * tile.block_t * (1 + is_gated)
        partials = torch.empty(grid[0] * grid[1] * tile.splits * area, dtype=torch.float32, device=x.device)
        arrivals = _arrivals(x.device)
    # Measured: with more tokens, or programs that wait for others to end, an early start only takes from those before.
    may_overlap = tile.block_t <= 16 and math.prod(grid) <= MOST_AT_ONCE
    overlap = pdl.overlap(product_kernel, x.device) if may_overlap else {}
    product_kernel[grid](
        x, weight, out, partials, arrivals, x.stride(0), tokens, outputs,
        width, tile.block_n, tile.block_t, tile.block_k, tile.splits, is_gated,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **overlap,
    )  # fmt: skip
    return out


@functools.cache
def _arrivals(device: torch.device) -> torch.Tensor:
    """Counters that every launch leaves at 0, so that the launches of a device share them, one after another."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("call linear once before a CUDA graph captures it: its counters belong to no graph")
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


_TYPES = {"x": "*", "weight": "*", "out": "*", "partials": "*fp32", "arrivals": "*i32"}
_TYPES |= {"x_row": "i32/16", "num_tokens": "i32", "num_outputs": "i32/16"}
COMPILE_CASES = [
    CompileCase(
        product_kernel,
        types,
        {"WIDTH": 2048, "BLOCK_N": tile.block_n, "BLOCK_T": tile.block_t, "BLOCK_K": tile.block_k}
        | {"SPLITS": tile.splits, "GATED": is_gated, "PDL": pdl_on},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        min_sm=90 if pdl_on else 80,
    )
    for pdl_on in (False, True)
    for types in each_dtype(_TYPES)
    if types["x"] != "*fp32"
    for tile, is_gated in ((Tile(64, 16, 128, 4, 4, 4), False), (Tile(64, 64, 64, 1, 4, 3), True))
]
