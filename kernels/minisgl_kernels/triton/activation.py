"""The gate of the MLP: silu(gate) · up, reading both halves of one tensor."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl_kernels.triton.cases import CompileCase, each_dtype, refuse, require

_BLOCK_ROWS, _BLOCK_WIDTH = 2, 1024  # each of 128 threads loads twice 16 bytes of gate and of up in 16 bits


@triton.jit(do_not_specialize=["rows"])
def silu_and_mul_kernel(
    gate_up_ptr,  # [rows, 2 · width]
    out_ptr,  # [rows, width]
    gate_up_stride,
    rows,
    width: tl.constexpr,
    block_rows: tl.constexpr,
    block_width: tl.constexpr,
):
    """Compute one tile [block_rows, block_width] of the output; neighbouring programs take neighbouring columns."""
    tiles_across: tl.constexpr = (width + block_width - 1) // block_width
    tile_row, tile_column = tl.program_id(0) // tiles_across, tl.program_id(0) % tiles_across
    row = tile_row.to(tl.int64) * block_rows + tl.arange(0, block_rows)[:, None]  # [block_rows, 1]
    column = tile_column * block_width + tl.arange(0, block_width)[None, :]  # [1, block_width]
    inside = (row < rows) & (column < width)
    source = gate_up_ptr + row * gate_up_stride + column
    gate = tl.load(source, mask=inside, other=0.0)  # [block_rows, block_width]
    up = tl.load(source + width, mask=inside, other=0.0)
    gate32 = gate.to(tl.float32)
    silu = gate32 / (1.0 + tl.exp(-gate32))  # in fp32: in 16 bits the exponential alone would cost two digits
    tl.store(out_ptr + row * width + column, silu.to(gate.dtype) * up, mask=inside)


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
    silu_and_mul_kernel[tiles,](flat, out, flat.stride(0), rows, width, _BLOCK_ROWS, block_width, num_warps=4)
    return out


_TYPES = {"gate_up_ptr": "*", "out_ptr": "*", "gate_up_stride": "i32/16", "rows": "i32"}
COMPILE_CASES = [
    CompileCase(silu_and_mul_kernel, types, {"width": width, "block_rows": _BLOCK_ROWS, "block_width": _BLOCK_WIDTH})
    for types in each_dtype(_TYPES)
    for width in (1536, 11008)
]
