"""Flash attention over pages for chunks of prompts, of any lengths in one launch.

A program holds a tile of queries and moves over the keys tile by tile with an online softmax: the scores never leave
the chip (FlashAttention-2, Dao, 2023). The query heads that share a KV head are rows of one tile, so that K and V are
read once for all of them.
"""

import torch
import triton
import triton.language as tl

from minisgl_kernels.triton import decode
from minisgl_kernels.triton.cases import CompileCase, each_dtype, is_small
from minisgl_kernels.triton.decode import LOG2_E, check_paged, paged_decode
from minisgl_kernels.triton.online_softmax import slots_at, softmax_step
from minisgl_kernels.triton.pdl import overlap, wait_for_previous


@triton.jit
def attend_tiles(
    query, largest, total, acc, asks, keys, values, table, first, end, scale,
    k_slot: tl.constexpr, v_slot: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Move a tile of queries [M, D], at positions `asks` [M], over keys [first, end), and carry three numbers a row.

    keys and values point to slot 0 of one KV head. Without MASKED every query sees every key.
    """
    dims, lanes = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    for start in range(first, end, BLOCK_N):
        positions = start + lanes
        slots = slots_at(table, positions, end, PAGE_SIZE)[:, None]
        if MASKED or HEAD_DIM != BLOCK_D:
            is_kv = (positions < end)[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(keys + slots * k_slot + dims[None, :], mask=is_kv, other=0.0)  # [N, D]
            v = tl.load(values + slots * v_slot + dims[None, :], mask=is_kv, other=0.0)
        else:
            k = tl.load(keys + slots * k_slot + dims[None, :])
            v = tl.load(values + slots * v_slot + dims[None, :])
        scores = tl.dot(query, tl.trans(k), input_precision=PRECISION)
        if MASKED:
            seen = (positions[None, :] <= asks[:, None]) & (positions < end)[None, :]
            if WINDOW:
                seen = seen & (positions[None, :] > asks[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        weights, largest, total, acc = softmax_step(scores, scale, largest, total, acc)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return largest, total, acc


@triton.jit
def sequence_of(tile, query_starts, num_sequences, BLOCK_Q: tl.constexpr):
    """The sequence of a tile of queries: sequence i has the tiles from query_starts[i] // BLOCK_Q + i on."""
    low, high = 0, num_sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_starts + middle) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit(do_not_specialize=["table_row", "num_sequences"], do_not_specialize_on_alignment=decode.INTEGERS)
def flash_kernel(
    q, keys, values, out, page_table, kv_lens, query_starts, num_sequences, scale,
    table_row, q_row: tl.constexpr, q_head: tl.constexpr,
    k_slot: tl.constexpr, k_head: tl.constexpr, v_slot: tl.constexpr, v_head: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """One program: BLOCK_Q tokens of one sequence, for the query heads of one KV head.

    Strides are compile-time constants: a pool has one layout, and address arithmetic then folds away.
    """
    wait_for_previous(PDL)
    kv_head, tile = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)  # the longest first
    sequence = sequence_of(tile, query_starts, num_sequences, BLOCK_Q)
    row = tl.load(query_starts + sequence)
    new = (tl.load(query_starts + sequence + 1) - row).to(tl.int32)  # tokens of the sequence in this step
    offset = (tile - (row // BLOCK_Q + sequence).to(tl.int32)) * BLOCK_Q  # of this tile among them
    if (offset >= new) | (new == 1):
        return  # the surplus of rounding, or a decode
    length = tl.load(kv_lens + sequence).to(tl.int32)  # 64 bits cost registers, and only slots need them

    members, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    tokens = offset + members // GROUP
    asks = length - new + tokens  # positions of the queries
    is_q = ((members < BLOCK_Q * GROUP) & (tokens < new))[:, None] & (dims < HEAD_DIM)[None, :]
    heads = (kv_head * GROUP + members % GROUP)[:, None]
    rows = (row + tokens)[:, None]
    query = tl.load(q + rows * q_row + heads * q_head + dims[None, :], mask=is_q, other=0.0)  # [M, D]

    table = page_table + sequence * table_row
    keys += kv_head * k_head
    values += kv_head * v_head
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    end = length - new + tl.minimum(offset + BLOCK_Q, new)
    edge = (length - new + offset + 1) // BLOCK_N * BLOCK_N  # before it, every query of the tile sees every key
    if WINDOW:
        edge = tl.maximum(length - new + offset - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    else:
        largest, total, acc = attend_tiles(
            query, largest, total, acc, asks, keys, values, table, 0, edge, scale, k_slot, v_slot,
            HEAD_DIM, PAGE_SIZE, WINDOW, False, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip
    largest, total, acc = attend_tiles(
        query, largest, total, acc, asks, keys, values, table, edge, end, scale, k_slot, v_slot,
        HEAD_DIM, PAGE_SIZE, WINDOW, True, BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip
    place = (rows * tl.num_programs(0) * GROUP + heads) * HEAD_DIM + dims[None, :]
    tl.store(out + place, (acc / total[:, None]).to(out.dtype.element_ty), mask=is_q)


def flash_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    kv_lens: torch.Tensor,
    query_starts: torch.Tensor,
    scale: float,
    window: int = 0,
) -> torch.Tensor:
    """Attention of the sequences that have several queries. Arguments as of reference.paged_attention.

    Returns:
        [T, heads, head_dim], of which the rows of sequences with one query are not written.
    """
    check_paged("flash_attention", q, keys, values)
    (tokens, heads, head_dim), kv_heads, batch = q.shape, keys.shape[1], len(kv_lens)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    group, tile = heads // kv_heads, tile_for(triton.next_power_of_2(head_dim) * q.element_size(), is_small(q.device))
    block_q = tile["BLOCK_M"] // group
    flash_kernel[(kv_heads, tokens // block_q + batch)](
        q, keys, values, out, page_table, kv_lens, query_starts, batch, scale * LOG2_E,
        page_table.stride(0), *q.stride()[:2], *keys.stride()[:2], *values.stride()[:2],
        GROUP=group, HEAD_DIM=head_dim, PAGE_SIZE=page_size, WINDOW=window, BLOCK_Q=block_q,
        BLOCK_D=triton.next_power_of_2(head_dim), PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        **tile, **overlap(flash_kernel, q.device),
    )  # fmt: skip
    return out


def tile_for(row_bytes: int, small: bool) -> dict[str, int]:
    """Queries and keys of a tile, and how it is launched, for heads of so many bytes.

    Registers are capped where two programs then share a multiprocessor: one multiplies while the other takes exponents.
    Measured on an H200; see chapter 6.
    """
    if small:
        return {"BLOCK_M": 64 if row_bytes <= 256 else 32, "BLOCK_N": max(16, 8192 // row_bytes), "num_warps": 8}
    if row_bytes <= 256:
        return {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3, "maxnreg": 128}
    return {"BLOCK_M": 64, "BLOCK_N": max(16, 16_384 // row_bytes), "num_warps": 8, "num_stages": 3}


def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    kv_lens: torch.Tensor,
    query_starts: torch.Tensor,
    scale: float,
    window: int = 0,
    max_queries: int = 0,
) -> torch.Tensor:
    """See reference.paged_attention.

    Args:
        max_queries: the most queries of a sequence, if known: 1 spares a launch.
    """
    paged = (q, keys, values, page_table, page_size, kv_lens, query_starts, scale, window)
    out = None if max_queries == 1 else flash_attention(*paged)
    return paged_decode(*paged, out)


COMPILE_CASES = [
    CompileCase(
        flash_kernel,
        {name: kind for name, kind in types.items() if name not in ("partials", "log_sums", "arrivals")}
        | {"num_sequences": "i32", "table_row": "i32"},
        decode._SHAPE
        | {"BLOCK_Q": tile["BLOCK_M"] // 2, "BLOCK_M": tile["BLOCK_M"], "BLOCK_N": tile["BLOCK_N"]}
        | {"PRECISION": "ieee" if types["q"] == "*fp32" else "tf32"},
        num_warps=tile["num_warps"],
        min_sm=75 if small else 80,
    )
    for small in (True, False)
    for types in each_dtype(decode._TYPES)
    for tile in [tile_for(512 if types["q"] == "*fp32" else 256, small)]
    if not (small and types["q"] == "*bf16")
]
