"""Decode attention over pages: one query a sequence, its keys cut into splits that run side by side.

A GPU needs many programs to keep its memory busy, and a batch of one has a handful of heads. So each sequence's keys
are cut into splits. Each leaves a partial result with the logarithm of its sum of weights, and the program that comes
last combines them (Flash-Decoding, Dao et al., 2023). How long a split is depends on the sequence's length, which only
the GPU reads: the launch is the same for all lengths, and so can be captured in a CUDA graph.
"""

import functools

import torch
import triton
import triton.language as tl

from minisgl_kernels.triton.cases import CompileCase, each_dtype, refuse, require
from minisgl_kernels.triton.online_softmax import slots_at, softmax_step

LOG2_E = 1.4426950408889634


@triton.jit
def decode_kernel(
    q, keys, values, out, partials, log_sums, arrivals, page_table, kv_lens, query_starts, scale,
    table_row, q_row: tl.constexpr, q_head: tl.constexpr,
    k_slot: tl.constexpr, k_head: tl.constexpr, v_slot: tl.constexpr, v_head: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    NUM_SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: the query heads that share a KV head, as rows of a tile, over one split of one sequence's keys.

    Strides are compile-time constants: a pool has one layout, and address arithmetic takes a third less.
    """
    kv_head, sequence, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(query_starts + sequence)
    if tl.load(query_starts + sequence + 1) - row != 1:
        return  # a chunk of a prompt, which flash_attention computes
    length = tl.load(kv_lens + sequence)
    begin = tl.maximum(length - WINDOW, 0) if WINDOW else 0
    split_len = tl.cdiv(tl.cdiv(length - begin, BLOCK_N), NUM_SPLITS) * BLOCK_N  # whole tiles
    first = begin + split * split_len
    end = tl.minimum(first + split_len, length)
    if first >= end:
        return  # a short sequence needs fewer splits

    members, dims, lanes = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    heads = kv_head * GROUP + members
    is_q = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    query = tl.load(q + row * q_row + heads[:, None] * q_head + dims[None, :], mask=is_q, other=0.0)  # [M, D]
    table = page_table + sequence.to(tl.int64) * table_row
    keys += kv_head * k_head
    values += kv_head * v_head
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(first, end, BLOCK_N):
        positions = start + lanes
        is_kv = (positions < end)[:, None] & (dims < HEAD_DIM)[None, :]
        slots = slots_at(table, positions, end, PAGE_SIZE)[:, None]
        k = tl.load(keys + slots * k_slot + dims[None, :], mask=is_kv, other=0.0)  # [N, D]
        v = tl.load(values + slots * v_slot + dims[None, :], mask=is_kv, other=0.0)
        scores = tl.dot(query, tl.trans(k), input_precision=PRECISION)  # [M, N]
        scores = tl.where((positions < end)[None, :], scores, float("-inf"))
        weights, largest, total, acc = softmax_step(scores, scale, largest, total, acc)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)

    result = acc / total[:, None]
    at = row * tl.num_programs(0) * GROUP + heads  # of the query heads among all rows of the output
    if NUM_SPLITS == 1:
        tl.store(out + at[:, None] * HEAD_DIM + dims[None, :], result.to(out.dtype.element_ty), mask=is_q)
    else:
        place = at * NUM_SPLITS + split
        tl.store(partials + place[:, None] * HEAD_DIM + dims[None, :], result, mask=is_q)
        tl.store(log_sums + place, largest + tl.log2(total), mask=members < GROUP)
        used = tl.cdiv(length - begin, split_len)
        if is_last(arrivals + sequence * tl.num_programs(0) + kv_head, used):
            for member in tl.static_range(GROUP):
                head = row * tl.num_programs(0) * GROUP + kv_head * GROUP + member
                combined = combine(partials, log_sums, head * NUM_SPLITS, used, HEAD_DIM, BLOCK_S, BLOCK_D)
                tl.store(out + head * HEAD_DIM + dims, combined.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit
def is_last(counter, expected):
    """Count this program's arrival at a counter; True for the last of those expected, which sets it back to 0."""
    tl.debug_barrier()  # all threads of this program have stored before one of them says so
    last = tl.atomic_add(counter, 1, sem="acq_rel") == expected - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def combine(
    partials, log_sums, first, used, HEAD_DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """One head's result [HEAD_DIM] from `used` partial ones, each weighted by its share of the sum of weights."""
    splits, dims = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    log_sum = tl.load(log_sums + first + splits, mask=splits < used, other=float("-inf"))
    weights = tl.exp2(log_sum - tl.max(log_sum, axis=0))
    is_partial = (splits < used)[:, None] & (dims < HEAD_DIM)[None, :]
    partial = tl.load(partials + (first + splits)[:, None] * HEAD_DIM + dims[None, :], mask=is_partial, other=0.0)
    return tl.sum(partial * weights[:, None], axis=0) / tl.sum(weights, axis=0)


def paged_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    kv_lens: torch.Tensor,
    query_starts: torch.Tensor,
    scale: float,
    window: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the sequences that have one query. Arguments as of reference.paged_attention.

    Args:
        out: [T, heads, head_dim] contiguous, where the rows of other sequences stay as they are; None makes it.
    """
    check_paged("paged_decode", q, keys, values)
    (_, heads, head_dim), kv_heads, batch = q.shape, keys.shape[1], len(kv_lens)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    num_splits = splits_for(batch * kv_heads)
    partials, log_sums, arrivals = out, out, out  # not touched without splits
    if num_splits > 1:
        partials = torch.empty(*q.shape[:2], num_splits, head_dim, dtype=torch.float32, device=q.device)
        log_sums = torch.empty(*q.shape[:2], num_splits, dtype=torch.float32, device=q.device)
        arrivals = _arrivals(q.device, torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else 0)
    decode_kernel[(kv_heads, batch, num_splits)](
        q, keys, values, out, partials, log_sums, arrivals, page_table, kv_lens, query_starts, scale * LOG2_E,
        page_table.stride(0), *q.stride()[:2], *keys.stride()[:2], *values.stride()[:2],
        GROUP=heads // kv_heads, HEAD_DIM=head_dim, PAGE_SIZE=page_size, WINDOW=window, NUM_SPLITS=num_splits,
        BLOCK_M=max(16, triton.next_power_of_2(heads // kv_heads)), BLOCK_N=keys_in_a_tile(head_dim, q.dtype),
        BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_S=triton.next_power_of_2(num_splits),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=2, num_stages=3,
    )  # fmt: skip
    return out


def check_paged(op: str, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Refuse what the attention kernels cannot do: a ValueError with the reason and the fallback."""
    require(op, q, keys, values)
    (_, heads, head_dim), (_, kv_heads, key_dim) = q.shape, keys.shape
    if head_dim > 256:
        refuse(op, f"head_dim is {head_dim}, and at most 256 fits", "attention")
    if heads % kv_heads or key_dim != head_dim or values.shape != keys.shape:
        refuse(op, f"q {list(q.shape)}, K {list(keys.shape)} and V {list(values.shape)} do not fit", "attention")


MOST_PROGRAMS = 1024  # with fewer, sequences are split


def splits_for(programs: int) -> int:
    """Splits of each sequence, from the number of programs that one split makes.

    Only the batch decides, which the host knows. Measured on an H200; chapter 6 shows how.
    """
    return 1 if programs >= MOST_PROGRAMS else min(64, MOST_PROGRAMS // 2 // programs + 1)


def keys_in_a_tile(head_dim: int, dtype: torch.dtype) -> int:
    """A tile of K is 16 KB, whatever the size of a head: several fit into shared memory, and one fills the loads."""
    return max(16, min(64, 16_384 // (triton.next_power_of_2(head_dim) * dtype.itemsize)))


@functools.cache
def _arrivals(device: torch.device, stream: int) -> torch.Tensor:
    """Counters that every launch leaves at 0. Launches on one stream follow one another, so they may share them."""
    return torch.zeros(MOST_PROGRAMS, dtype=torch.int32, device=device)


_TYPES = {"q": "*", "keys": "*", "values": "*", "out": "*", "partials": "*fp32", "log_sums": "*fp32"}
_TYPES |= {"arrivals": "*i32", "page_table": "*i64", "kv_lens": "*i64", "query_starts": "*i64", "scale": "fp32"}
_SHAPE = {"q_row": 2048, "q_head": 128, "k_slot": 1024, "k_head": 128, "v_slot": 1024, "v_head": 128}
_SHAPE |= {"GROUP": 2, "HEAD_DIM": 128, "BLOCK_D": 128, "PAGE_SIZE": 16, "WINDOW": 0}
COMPILE_CASES = [
    CompileCase(
        decode_kernel,
        types | {"table_row": "i32"},
        _SHAPE
        | {
            "NUM_SPLITS": num_splits,
            "BLOCK_S": num_splits,
            "BLOCK_M": 16,
            "BLOCK_N": 64 // (1 + (types["q"] == "*fp32")),
        }
        | {"PRECISION": "ieee" if types["q"] == "*fp32" else "tf32"},
        num_warps=2,
    )
    for types in each_dtype(_TYPES)
    for num_splits in (1, 64)
]
