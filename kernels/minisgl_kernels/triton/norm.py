"""RMSNorm, alone and behind the addition to the residual stream: each tensor read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl_kernels.triton.cases import CompileCase, each_dtype, refuse, require
from minisgl_kernels.triton.pdl import overlap, wait_for_previous


@triton.jit(do_not_specialize=["inner", "rows"])
def rms_norm_kernel(
    x,  # [rows / inner, inner, HIDDEN]
    weight,  # [HIDDEN]
    out,  # [rows, HIDDEN]
    outer_stride,
    inner_stride,
    inner,
    rows,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Normalise BLOCK_ROWS rows, each read whole: the mean square is known before the row leaves the registers."""
    wait_for_previous(PDL)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]  # [BLOCK_ROWS, 1]
    column = tl.arange(0, BLOCK_HIDDEN)[None, :]  # [1, BLOCK_HIDDEN]
    inside = (row < rows) & (column < HIDDEN)
    source = (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
    given = tl.load(x + source + column, mask=inside, other=0.0)  # [BLOCK_ROWS, BLOCK_HIDDEN]
    gain = tl.load(weight + column, mask=column < HIDDEN, other=0.0)  # [1, BLOCK_HIDDEN]
    x32 = given.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(x32 * x32, axis=1, keep_dims=True) / HIDDEN + eps)  # [BLOCK_ROWS, 1]
    normed = (x32 * inverse_rms).to(given.dtype) * gain
    tl.store(out + row.to(tl.int64) * HIDDEN + column, normed, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def add_rms_norm_kernel(
    x,  # [rows, HIDDEN]
    residual,  # [rows, HIDDEN]
    weight,  # [HIDDEN]
    normed_out,  # [rows, HIDDEN]
    total_out,  # [rows, HIDDEN]
    x_stride,
    residual_stride,
    rows,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Add BLOCK_ROWS rows of x to the residual stream and normalise the sum, rounded as it is kept.

    The sum is written and normalised from the same registers. Columns beyond HIDDEN are read as 0, which adds nothing
    to the sum of squares, and are not written.
    """
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]  # [BLOCK_ROWS, 1]
    column = tl.arange(0, BLOCK_HIDDEN)[None, :]  # [1, BLOCK_HIDDEN]
    inside = (row < rows) & (column < HIDDEN)
    added = tl.load(x + row * x_stride + column, mask=inside, other=0.0)  # [BLOCK_ROWS, BLOCK_HIDDEN]
    kept = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0)
    gain = tl.load(weight + column, mask=column < HIDDEN, other=0.0)  # [1, BLOCK_HIDDEN]
    total = (kept.to(tl.float32) + added.to(tl.float32)).to(added.dtype)
    total32 = total.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(total32 * total32, axis=1, keep_dims=True) / HIDDEN + eps)  # [BLOCK_ROWS, 1]
    normed = (total32 * inverse_rms).to(added.dtype) * gain
    tl.store(total_out + row * HIDDEN + column, total, mask=inside)
    tl.store(normed_out + row * HIDDEN + column, normed, mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `reference.rms_norm`. x [..., hidden] may be a part of a larger tensor.

    Raises:
        ValueError: for what `cases.require` refuses.
    """
    require("rms_norm", x, weight)
    hidden = x.shape[-1]
    out = x.new_empty(x.shape)
    grouped = x if x.dim() == 3 else x.reshape(-1, 1, hidden)  # heads of a token are evenly spaced, tokens are too
    outer, inner, _ = grouped.shape
    rows = outer * inner
    blocks = row_blocks(hidden)
    rms_norm_kernel[triton.cdiv(rows, blocks["BLOCK_ROWS"]),](
        grouped, weight, out, grouped.stride(0), grouped.stride(1), inner, rows, eps, hidden,
        **blocks, **overlap(rms_norm_kernel, x.device),
    )  # fmt: skip
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.add_rms_norm`; new tensors, x and residual stay as they are.

    Raises:
        ValueError: shapes differ, or what `cases.require` refuses.
    """
    if residual is None:
        return rms_norm(x, weight, eps), x
    require("add_rms_norm", x, residual, weight)
    if x.shape != residual.shape:
        refuse("add_rms_norm", f"x is {list(x.shape)} and the residual {list(residual.shape)}")
    hidden = x.shape[-1]
    normed, total = x.new_empty(x.shape), x.new_empty(x.shape)
    x, residual = x.reshape(-1, hidden), residual.reshape(-1, hidden)
    rows = len(x)
    blocks = row_blocks(hidden)
    add_rms_norm_kernel[triton.cdiv(rows, blocks["BLOCK_ROWS"]),](
        x, residual, weight, normed, total, x.stride(0), residual.stride(0), rows, eps, hidden,
        **blocks, **overlap(add_rms_norm_kernel, x.device),
    )  # fmt: skip
    return normed, total


def row_blocks(hidden: int) -> dict[str, int]:
    """Rows a program, their padded length, and warps, so that each thread loads 16 elements of a tensor at once.

    In 16 bits that is two accesses of 16 bytes: enough bytes in flight, few enough registers that many programs share
    a multiprocessor and one computes while others wait for memory.
    """
    block_hidden = triton.next_power_of_2(hidden)
    block_rows = max(1, 2048 // block_hidden)
    num_warps = min(max(block_rows * block_hidden // 512, 1), 16)
    return {"BLOCK_ROWS": block_rows, "BLOCK_HIDDEN": block_hidden, "num_warps": num_warps}


_NORM = {"x": "*", "weight": "*", "out": "*", "outer_stride": "i32/16", "inner_stride": "i32/16"}
_NORM |= {"inner": "i32", "rows": "i32", "eps": "fp32"}
_ADD_NORM = {"x": "*", "residual": "*", "weight": "*", "normed_out": "*", "total_out": "*"}
_ADD_NORM |= {"x_stride": "i32/16", "residual_stride": "i32/16", "rows": "i32", "eps": "fp32"}


def _case(kernel: object, types: dict[str, str], hidden: int) -> CompileCase:
    blocks = row_blocks(hidden)
    num_warps = blocks.pop("num_warps")
    return CompileCase(kernel, types, {"HIDDEN": hidden, **blocks}, num_warps)


COMPILE_CASES = [_case(rms_norm_kernel, types, hidden) for types in each_dtype(_NORM) for hidden in (128, 4096)]
COMPILE_CASES += [
    _case(add_rms_norm_kernel, types, hidden) for types in each_dtype(_ADD_NORM) for hidden in (576, 1024, 16384)
]
