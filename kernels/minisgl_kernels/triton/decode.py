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

from minisgl_kernels.triton.cases import CompileCase, each_dtype, is_small, refuse, require
from minisgl_kernels.triton.online_softmax import slots_at, softmax_step
from minisgl_kernels.triton.pdl import overlap, wait_for_previous

LOG2_E = 1.4426950408889634
INTEGERS = ["page_table", "kv_lens", "query_starts"]  # views of packed tensors: one compilation for any alignment


@triton.jit
def attend_split(
    query, keys, values, table, first, end, scale, k_slot: tl.constexpr, v_slot: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Move the queries of a group [M, D] over a sequence's keys [first, end), tile by tile; all of them are seen.

    keys and values point to slot 0 of one KV head. Returns three numbers a row: the largest score, times scale; the sum
    of weights [M] and the weighted sum of values [M, D], both relative to it (see softmax_step).
    """
    dims, lanes = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
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
    return largest, total, acc


@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=INTEGERS)
def decode_kernel(
    q, keys, values, out, partials, log_sums, arrivals, page_table, kv_lens, query_starts, scale,
    table_row, q_row: tl.constexpr, q_head: tl.constexpr,
    k_slot: tl.constexpr, k_head: tl.constexpr, v_slot: tl.constexpr, v_head: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    NUM_SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """One program: the query heads that share a KV head, as rows of a tile, over one split of one sequence's keys.

    Strides are compile-time constants: a pool has one layout, and address arithmetic then folds away.
    """
    wait_for_previous(PDL)
    kv_head, sequence, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, next_row = tl.load(query_starts + sequence), tl.load(query_starts + sequence + 1)
    length = tl.load(kv_lens + sequence).to(tl.int32)  # 64 bits cost registers, and only slots need them
    if next_row - row != 1:
        return  # a chunk of a prompt, which flash_attention computes
    begin = tl.maximum(length - WINDOW, 0) if WINDOW else 0
    split_len = tl.cdiv(tl.cdiv(length - begin, BLOCK_N), NUM_SPLITS) * BLOCK_N  # whole tiles
    first = begin + split * split_len
    end = tl.minimum(first + split_len, length)
    if first >= end:
        return  # a short sequence needs fewer splits

    members, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + members
    is_q = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    query = tl.load(q + row * q_row + heads[:, None] * q_head + dims[None, :], mask=is_q, other=0.0)  # [M, D]
    table = page_table + sequence.to(tl.int64) * table_row
    keys += kv_head * k_head
    values += kv_head * v_head
    largest, total, acc = attend_split(
        query, keys, values, table, first, end, scale, k_slot, v_slot,
        HEAD_DIM, PAGE_SIZE, BLOCK_M, BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip

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
            first_head = (row * tl.num_programs(0) + kv_head) * GROUP
            combine(partials, log_sums, out, first_head, used, GROUP, HEAD_DIM, NUM_SPLITS, BLOCK_D)


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
    partials, log_sums, out, first_head, used,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sum the `used` partial results of each head of a group, weighted by their shares of all weights, into out.

    All heads at once: what the last program does, everybody waits for.
    """
    BLOCK_G: tl.constexpr = triton.next_power_of_2(GROUP)
    BLOCK_S: tl.constexpr = triton.next_power_of_2(NUM_SPLITS)
    CHUNK: tl.constexpr = min(BLOCK_S, 16)
    members, splits, dims = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    at = ((first_head + members) * NUM_SPLITS)[:, None]  # [G, 1], the first partial of each head
    is_used = (members < GROUP)[:, None] & (splits < used)[None, :]
    log_sum = tl.load(log_sums + at + splits[None, :], mask=is_used, other=float("-inf"))  # [G, S]
    largest = tl.where(members < GROUP, tl.max(log_sum, axis=1), 0.0)[:, None]
    total = tl.where(members < GROUP, tl.sum(tl.exp2(log_sum - largest), axis=1), 1.0)
    result = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in tl.static_range(0, BLOCK_S, CHUNK):
        splits = start + tl.arange(0, CHUNK)
        is_used = (members < GROUP)[:, None] & (splits < used)[None, :]
        place = at + splits[None, :]  # [G, CHUNK]
        weights = tl.exp2(tl.load(log_sums + place, mask=is_used, other=float("-inf")) - largest)
        is_partial = is_used[:, :, None] & (dims < HEAD_DIM)[None, None, :]
        partial = tl.load(partials + place[:, :, None] * HEAD_DIM + dims[None, None, :], mask=is_partial, other=0.0)
        result += tl.sum(weights[:, :, None] * partial, axis=1)
    is_out = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    to = out + (first_head + members)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(to, (result / total[:, None]).to(out.dtype.element_ty), mask=is_out)


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

    Launches on one device must follow one another: where sequences are split, they share counters.

    Args:
        out: [T, heads, head_dim] contiguous, where the rows of other sequences stay as they are; None makes it.

    Raises:
        ValueError: a shape, dtype, layout or device that the kernel does not know.
        RuntimeError: the first call that splits sequences is captured in a CUDA graph.
    """
    check_paged("paged_decode", q, keys, values)
    (_, heads, head_dim), kv_heads, batch = q.shape, keys.shape[1], len(kv_lens)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    row_bytes = triton.next_power_of_2(head_dim) * q.element_size()
    num_splits, block_n, num_warps, num_stages = launch_for(batch * kv_heads, row_bytes)
    if is_small(q.device):
        block_n = max(16, block_n // 2)
    partials, log_sums, arrivals = out, out, out  # not touched without splits
    if num_splits > 1:
        partials = torch.empty(*q.shape[:2], num_splits, head_dim, dtype=torch.float32, device=q.device)
        log_sums = torch.empty(*q.shape[:2], num_splits, dtype=torch.float32, device=q.device)
        arrivals = _arrivals(q.device)
    decode_kernel[(kv_heads, batch, num_splits)](
        q, keys, values, out, partials, log_sums, arrivals, page_table, kv_lens, query_starts, scale * LOG2_E,
        page_table.stride(0), *q.stride()[:2], *keys.stride()[:2], *values.stride()[:2],
        GROUP=heads // kv_heads, HEAD_DIM=head_dim, PAGE_SIZE=page_size, WINDOW=window, NUM_SPLITS=num_splits,
        BLOCK_M=max(16, triton.next_power_of_2(heads // kv_heads)), BLOCK_N=block_n,
        BLOCK_D=triton.next_power_of_2(head_dim), PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=num_warps, num_stages=num_stages, **overlap(decode_kernel, q.device),
    )  # fmt: skip
    return out


def check_paged(op: str, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Refuse what the attention kernels cannot do: a ValueError with the reason and the fallback."""
    require(op, q, keys, values, switch="attention")
    (_, heads, head_dim), (_, kv_heads, key_dim) = q.shape, keys.shape
    if head_dim > 256:
        refuse(op, f"head_dim is {head_dim}, and at most 256 fits", "attention")
    if heads % kv_heads or key_dim != head_dim or values.shape != keys.shape:
        refuse(op, f"q {list(q.shape)}, K {list(keys.shape)} and V {list(values.shape)} do not fit", "attention")


MOST_PROGRAMS = 512  # sequences are split until there are this many: about four to a multiprocessor of an H200


def launch_for(programs: int, row_bytes: int) -> tuple[int, int, int, int]:
    """Splits of a sequence, keys of a tile, warps and stages, for so many sequences times KV heads.

    Only the batch decides, which the host knows; row_bytes are those of one head of K. Measured on an H200: everybody
    waits for the program that combines the splits, so a small batch has fewer than would fit, each with a deeper
    pipeline, and not fewer still for the sake of long contexts. Many programs keep the memory busy with small tiles.
    """
    keys = 64 if programs < 2 * MOST_PROGRAMS else 32
    keys = max(16, min(keys, keys * 256 // row_bytes))
    if programs < 32:
        return min(32, MOST_PROGRAMS // (2 * programs) or 1), keys, 2, 5
    return max(1, MOST_PROGRAMS // programs), keys, 2, 4


@functools.cache
def _arrivals(device: torch.device) -> torch.Tensor:
    """Counters that every launch leaves at 0, so that the launches of a device share them, one after another."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("call paged_decode once before a CUDA graph captures it: its counters belong to no graph")
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
            "BLOCK_M": 16,
            "BLOCK_N": 64 // (1 + (types["q"] == "*fp32")),
        }
        | {"PRECISION": "ieee" if types["q"] == "*fp32" else "tf32"},
        num_warps=2,
    )
    for types in each_dtype(_TYPES)
    for num_splits in (1, 64)
]
