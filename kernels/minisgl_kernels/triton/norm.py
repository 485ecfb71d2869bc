"""RMSNorm, alone and behind the addition to the residual stream: each tensor read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl_kernels.triton.cases import CompileCase, each_dtype, refuse, require


@triton.jit(do_not_specialize=["inner", "rows"])
def rms_norm_kernel(
    x_ptr,  # [rows / inner, inner, hidden]
    weight_ptr,  # [hidden]
    out_ptr,  # [rows, hidden]
    outer_stride,
    inner_stride,
    inner,
    rows,
    eps,
    hidden: tl.constexpr,
    block_rows: tl.constexpr,
    block_hidden: tl.constexpr,
):
    """Normalise block_rows rows, each read whole: the mean square is known before the row leaves the registers."""
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)[:, None]  # [block_rows, 1]
    column = tl.arange(0, block_hidden)[None, :]  # [1, block_hidden]
    inside = (row < rows) & (column < hidden)
    source = (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
    x = tl.load(x_ptr + source + column, mask=inside, other=0.0)  # [block_rows, block_hidden]
    weight = tl.load(weight_ptr + column, mask=column < hidden, other=0.0)  # [1, block_hidden]
    x32 = x.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(x32 * x32, axis=1, keep_dims=True) / hidden + eps)  # [block_rows, 1]
    normed = (x32 * inverse_rms).to(x.dtype) * weight
    tl.store(out_ptr + row.to(tl.int64) * hidden + column, normed, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def add_rms_norm_kernel(
    x_ptr,  # [rows, hidden]
    residual_ptr,  # [rows, hidden]
    weight_ptr,  # [hidden]
    normed_ptr,  # [rows, hidden]
    total_ptr,  # [rows, hidden]
    x_stride,
    residual_stride,
    rows,
    eps,
    hidden: tl.constexpr,
    block_rows: tl.constexpr,
    block_hidden: tl.constexpr,
):
    """Add block_rows rows of x to the residual stream and normalise the sum, rounded as it is kept.

    The sum is written and normalised from the same registers. Columns beyond hidden are read as 0, which adds nothing
    to the sum of squares, and are not written.
    """
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)[:, None]  # [block_rows, 1]
    column = tl.arange(0, block_hidden)[None, :]  # [1, block_hidden]
    inside = (row < rows) & (column < hidden)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)  # [block_rows, block_hidden]
    residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + column, mask=column < hidden, other=0.0)  # [1, block_hidden]
    total = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    total32 = total.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(total32 * total32, axis=1, keep_dims=True) / hidden + eps)  # [block_rows, 1]
    normed = (total32 * inverse_rms).to(x.dtype) * weight
    tl.store(total_ptr + row * hidden + column, total, mask=inside)
    tl.store(normed_ptr + row * hidden + column, normed, mask=inside)


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
    rms_norm_kernel[triton.cdiv(rows, blocks["block_rows"]),](
        grouped, weight, out, grouped.stride(0), grouped.stride(1), inner, rows, eps, hidden, **blocks
    )
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
    add_rms_norm_kernel[triton.cdiv(rows, blocks["block_rows"]),](
        x, residual, weight, normed, total, x.stride(0), residual.stride(0), rows, eps, hidden, **blocks
    )
    return normed, total


def row_blocks(hidden: int) -> dict[str, int]:
    """Rows a program, their padded length, and warps, so that each thread loads 16 elements of a tensor at once.

    In 16 bits that is two accesses of 16 bytes: enough bytes in flight, few enough registers that many programs share
    a multiprocessor and one computes while others wait for memory.
    """
    block_hidden = triton.next_power_of_2(hidden)
    block_rows = max(1, 2048 // block_hidden)
    num_warps = min(max(block_rows * block_hidden // 512, 1), 16)
    return {"block_rows": block_rows, "block_hidden": block_hidden, "num_warps": num_warps}


_NORM = {"x_ptr": "*", "weight_ptr": "*", "out_ptr": "*", "outer_stride": "i32/16", "inner_stride": "i32/16"}
_NORM |= {"inner": "i32", "rows": "i32", "eps": "fp32"}
_ADD_NORM = {"x_ptr": "*", "residual_ptr": "*", "weight_ptr": "*", "normed_ptr": "*", "total_ptr": "*"}
_ADD_NORM |= {"x_stride": "i32/16", "residual_stride": "i32/16", "rows": "i32", "eps": "fp32"}


def _case(kernel: object, types: dict[str, str], hidden: int) -> CompileCase:
    blocks = row_blocks(hidden)
    num_warps = blocks.pop("num_warps")
    return CompileCase(kernel, types, {"hidden": hidden, **blocks}, num_warps)


COMPILE_CASES = [_case(rms_norm_kernel, types, hidden) for types in each_dtype(_NORM) for hidden in (128, 4096)]
COMPILE_CASES += [
    _case(add_rms_norm_kernel, types, hidden) for types in each_dtype(_ADD_NORM) for hidden in (576, 1024, 16384)
]
