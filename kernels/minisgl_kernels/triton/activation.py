"""The gate of the MLP: silu(gate) · up, reading both halves of one tensor."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from minisgl_kernels.triton.cases import CompileCase, each_dtype, refuse, require
from minisgl_kernels.triton.pdl import overlap, wait_for_previous

_BLOCK_ROWS, _BLOCK_WIDTH = 2, 1024  # each of 128 threads loads twice 16 bytes of gate and of up in 16 bits


@triton.jit(do_not_specialize=["rows"])
def silu_and_mul_kernel(
    gate_up,  # [rows, 2 · WIDTH]
    out,  # [rows, WIDTH]
    gate_up_stride,
    rows,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Compute one tile [BLOCK_ROWS, BLOCK_WIDTH] of the output; neighbouring programs take neighbouring columns."""
    wait_for_previous(PDL)
    TILES_ACROSS: tl.constexpr = (WIDTH + BLOCK_WIDTH - 1) // BLOCK_WIDTH
    tile_row, tile_column = tl.program_id(0) // TILES_ACROSS, tl.program_id(0) % TILES_ACROSS
    row = tile_row.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]  # [BLOCK_ROWS, 1]
    column = tile_column * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)[None, :]  # [1, BLOCK_WIDTH]
    inside = (row < rows) & (column < WIDTH)
    source = gate_up + row * gate_up_stride + column
    gate = tl.load(source, mask=inside, other=0.0)  # [BLOCK_ROWS, BLOCK_WIDTH]
    up = tl.load(source + WIDTH, mask=inside, other=0.0)
    gate32 = gate.to(tl.float32)
    silu = gate32 / (1.0 + tl.exp(-gate32))  # in fp32: in 16 bits the exponential alone would cost two digits
    tl.store(out + row * WIDTH + column, silu.to(gate.dtype) * up, mask=inside)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `reference.silu_and_mul`.

    Raises:
        ValueError: the last dimension is odd, or what `cases.require` refuses.
    """
    require("silu_and_mul", gate_up)
    width, odd = divmod(gate_up.shape[-1], 2)
    if odd:
        refuse("silu_and_mul", f"{gate_up.shape[-1]} columns do not halve into gate and up")
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    flat = gate_up.reshape(-1, 2 * width)
    rows = len(flat)
    block_width = min(_BLOCK_WIDTH, triton.next_power_of_2(width))
    tiles = triton.cdiv(rows, _BLOCK_ROWS) * triton.cdiv(width, block_width)
    silu_and_mul_kernel[tiles,](
        flat, out, flat.stride(0), rows, width, _BLOCK_ROWS, block_width,
        num_warps=4, **overlap(silu_and_mul_kernel, flat.device),
    )  # fmt: skip
    return out


def linear_silu_mul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """See `reference.linear_silu_mul`: torch's product, then the gate. `decode_ops` has both in one kernel.

    Raises:
        ValueError: as `silu_and_mul`.
    """
    return silu_and_mul(F.linear(x, weight, bias))


_TYPES = {"gate_up": "*", "out": "*", "gate_up_stride": "i32/16", "rows": "i32"}
COMPILE_CASES = [
    CompileCase(silu_and_mul_kernel, types, {"WIDTH": width, "BLOCK_ROWS": _BLOCK_ROWS, "BLOCK_WIDTH": _BLOCK_WIDTH})
    for types in each_dtype(_TYPES)
    for width in (1536, 11008)
]
