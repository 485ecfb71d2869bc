"""The embedding gather: the rows of the table that the tokens name."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl_kernels.triton.cases import CompileCase, each_dtype, refuse, require
from minisgl_kernels.triton.pdl import overlap, wait_for_previous

_BLOCK_ROWS, _BLOCK_HIDDEN = 2, 1024


@triton.jit(do_not_specialize=["ids_stride", "vocab", "tokens"], do_not_specialize_on_alignment=["ids"])
def embedding_kernel(
    ids,  # [T] int64
    weight,  # [vocab, HIDDEN]
    out,  # [T, HIDDEN]
    ids_stride,
    weight_stride,
    vocab,
    tokens,
    HIDDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Copy one block of BLOCK_ROWS tokens' rows. An id outside the table gives NaN, which nothing later overlooks."""
    wait_for_previous(PDL)
    BLOCKS: tl.constexpr = (HIDDEN + BLOCK_HIDDEN - 1) // BLOCK_HIDDEN
    token = (tl.program_id(0) // BLOCKS).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # [BLOCK_ROWS]
    id = tl.load(ids + token * ids_stride, mask=token < tokens, other=-1)[:, None]  # [BLOCK_ROWS, 1]
    column = (tl.program_id(0) % BLOCKS) * BLOCK_HIDDEN + tl.arange(0, BLOCK_HIDDEN)[None, :]  # [1, BLOCK_HIDDEN]
    known = (id >= 0) & (id < vocab) & (column < HIDDEN)
    row = tl.load(weight + id * weight_stride + column, mask=known, other=float("nan"))
    token = token[:, None]
    tl.store(out + token * HIDDEN + column, row, mask=(token < tokens) & (column < HIDDEN))


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
        ids, weight, out, ids.stride(0), weight.stride(0), vocab, tokens, hidden, _BLOCK_ROWS, block_hidden,
        **overlap(embedding_kernel, ids.device),
    )  # fmt: skip
    return out


_TYPES = {"ids": "*i64", "weight": "*", "out": "*", "ids_stride": "i32", "weight_stride": "i32/16"}
_TYPES |= {"vocab": "i32", "tokens": "i32"}
COMPILE_CASES = [
    CompileCase(embedding_kernel, types, {"HIDDEN": hidden, "BLOCK_ROWS": _BLOCK_ROWS, "BLOCK_HIDDEN": _BLOCK_HIDDEN})
    for types in each_dtype(_TYPES)
    for hidden in (576, 4096)
]
