"""The embedding gather: the rows of the table that the tokens name."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl_kernels.triton.cases import CompileCase, each_dtype, refuse, require

_BLOCK_ROWS, _BLOCK_HIDDEN = 2, 1024


@triton.jit(do_not_specialize=["ids_stride", "tokens"])
def embedding_kernel(
    ids_ptr,  # [T] int64
    weight_ptr,  # [vocab, hidden]
    out_ptr,  # [T, hidden]
    ids_stride,
    weight_stride,
    vocab,
    tokens,
    hidden: tl.constexpr,
    block_rows: tl.constexpr,
    block_hidden: tl.constexpr,
):
    """Copy one block of block_rows tokens' rows. An id outside the table gives NaN, which nothing later overlooks."""
    blocks: tl.constexpr = (hidden + block_hidden - 1) // block_hidden
    token = (tl.program_id(0) // blocks).to(tl.int64) * block_rows + tl.arange(0, block_rows)  # [block_rows]
    id = tl.load(ids_ptr + token * ids_stride, mask=token < tokens, other=-1)[:, None]  # [block_rows, 1]
    column = (tl.program_id(0) % blocks) * block_hidden + tl.arange(0, block_hidden)[None, :]  # [1, block_hidden]
    known = (id >= 0) & (id < vocab) & (column < hidden)
    row = tl.load(weight_ptr + id * weight_stride + column, mask=known, other=float("nan"))
    token = token[:, None]
    tl.store(out_ptr + token * hidden + column, row, mask=(token < tokens) & (column < hidden))


def embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See `reference.embedding`: ids [T] int64, weight [vocab, hidden] → [T, hidden].

    An id outside the table cannot raise without waiting for the GPU: its row is NaN.

    Raises:
        ValueError: ids that are no [T] int64 on the device of weight, or what `cases.require` refuses.
    """
    require("embedding", weight)
    if ids.dim() != 1 or ids.dtype != torch.int64 or ids.device != weight.device:
        refuse("embedding", f"ids are {list(ids.shape)} {ids.dtype} on {ids.device}, not [T] int64 on {weight.device}")
    vocab, hidden = weight.shape
    out = weight.new_empty(len(ids), hidden)
    block_hidden = min(_BLOCK_HIDDEN, triton.next_power_of_2(hidden))
    tokens = len(ids)
    tiles = triton.cdiv(tokens, _BLOCK_ROWS) * triton.cdiv(hidden, block_hidden)
    embedding_kernel[tiles,](
        ids, weight, out, ids.stride(0), weight.stride(0), vocab, tokens, hidden, _BLOCK_ROWS, block_hidden
    )
    return out


_TYPES = {"ids_ptr": "*i64", "weight_ptr": "*", "out_ptr": "*", "ids_stride": "i32", "weight_stride": "i32/16"}
_TYPES |= {"vocab": "i32", "tokens": "i32"}
COMPILE_CASES = [
    CompileCase(embedding_kernel, types, {"hidden": hidden, "block_rows": _BLOCK_ROWS, "block_hidden": _BLOCK_HIDDEN})
    for types in each_dtype(_TYPES)
    for hidden in (576, 4096)
]
