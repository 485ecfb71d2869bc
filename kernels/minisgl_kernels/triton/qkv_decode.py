"""Decode attention from the qkv projection on: norms of q and k, rotation, and the store of K and V in the same kernel.

decode.py's kernel, for steps of one token a sequence. Each program makes the queries of its group itself: they are few.
The new token's K and V go to the pool for later steps; in this one nobody reads them there, since programs of a launch
do not wait for one another. The first split of each KV head has made them and attends to them as it holds them.
"""

import torch
import triton
import triton.language as tl

from minisgl_kernels.triton import decode
from minisgl_kernels.triton.cases import CompileCase, each_dtype, refuse, require
from minisgl_kernels.triton.decode import LOG2_E, attend_split, check_paged, plan, store_result
from minisgl_kernels.triton.online_softmax import softmax_step
from minisgl_kernels.triton.pdl import overlap, prefetch, wait_for_previous
from minisgl_kernels.triton.qkv import _check_angles


@triton.jit
def norm_and_rotate(heads, weight, cosine, sine, eps, mask, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Heads [R, D], which begin at `heads` [R, 1]: normalised if there is a weight, then rotated.

    cosine and sine are of each element, [1, D], with the sine of the first half negated. Rotated with an element is the
    one half a head away, which another thread holds: so each is read twice, the second time from the cache.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    dims = tl.arange(0, BLOCK_D)[None, :]
    others = tl.where(dims < HALF, dims + HALF, dims - HALF)
    own, other = tl.load(heads + dims, mask=mask, other=0.0), tl.load(heads + others, mask=mask, other=0.0)
    x, y = own.to(tl.float32), other.to(tl.float32)
    if weight is not None:
        inverse_rms = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / HEAD_DIM + eps)  # [R, 1]
        is_weight = dims < HEAD_DIM
        x = ((x * inverse_rms).to(own.dtype) * tl.load(weight + dims, mask=is_weight, other=0.0)).to(tl.float32)
        y = ((y * inverse_rms).to(own.dtype) * tl.load(weight + others, mask=is_weight, other=0.0)).to(tl.float32)
    return (x * cosine + y * sine).to(own.dtype)


@triton.jit
def repeat(x, TIMES: tl.constexpr):
    """Rows x [R, D] again and again: [TIMES · R, D]. A tensor core multiplies 16 rows, and a group has fewer."""
    rows: tl.constexpr = x.shape[0]
    width: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(x[None, :, :], [TIMES, rows, width]), [TIMES * rows, width])


@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["slots", "page_table", "kv_lens"])
def qkv_decode_kernel(
    qkv,  # [T, heads + 2 · kv_heads, HEAD_DIM]
    q_weight, k_weight,  # [HEAD_DIM], or None
    cos, sin,  # [T, HEAD_DIM / 2]
    keys, values, slots, out, partials, log_sums, arrivals, page_table, kv_lens, eps, scale,
    table_row, token_row: tl.constexpr, token_head: tl.constexpr, angle_row: tl.constexpr,
    k_slot: tl.constexpr, k_head: tl.constexpr, v_slot: tl.constexpr, v_head: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    NUM_SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """One program, as in decode_kernel: the query heads that share a KV head over one split of one sequence's keys.

    Splits divide the keys before the new token. The first takes in the new one last: a tile of one key.
    """
    dims = tl.arange(0, BLOCK_D)[None, :]
    if PDL and q_weight is not None:  # they come from memory, and qkv from the cache: begin now
        prefetch(q_weight + tl.minimum(dims, HEAD_DIM - 1))
        prefetch(k_weight + tl.minimum(dims, HEAD_DIM - 1))
    wait_for_previous(PDL)
    kv_head, sequence, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    past = tl.load(kv_lens + sequence).to(tl.int32) - 1  # tokens before the new one
    begin = tl.maximum(past + 1 - WINDOW, 0) if WINDOW else 0
    split_len = tl.maximum(tl.cdiv(tl.cdiv(past - begin, BLOCK_N), NUM_SPLITS), 1) * BLOCK_N  # whole tiles
    used = tl.maximum(tl.cdiv(past - begin, split_len), 1)  # without a past, one for the new token
    if split >= used:
        return
    first = begin + split * split_len
    end = tl.minimum(first + split_len, past)

    HALF: tl.constexpr = HEAD_DIM // 2
    BLOCK_G: tl.constexpr = triton.next_power_of_2(GROUP)
    kv_heads, row = tl.num_programs(0), sequence.to(tl.int64)
    heads = qkv + row * token_row
    angles, is_dim = row * angle_row + tl.where(dims < HALF, dims, dims - HALF), dims < HEAD_DIM
    cosine = tl.load(cos + angles, mask=is_dim, other=0.0).to(tl.float32)  # [1, D]
    sine = tl.load(sin + angles, mask=is_dim, other=0.0).to(tl.float32)
    sine = tl.where(dims < HALF, -sine, sine)
    members = tl.arange(0, BLOCK_G)[:, None]
    q_heads = heads + (kv_head * GROUP + members) * token_head
    q = norm_and_rotate(q_heads, q_weight, cosine, sine, eps, (members < GROUP) & is_dim, HEAD_DIM, BLOCK_D)  # [G, D]

    is_new = dims < tl.where(split == 0, HEAD_DIM, 0)  # [1, D], nothing for other splits
    keys += kv_head * k_head
    values += kv_head * v_head
    k_heads = heads + (kv_heads * GROUP + kv_head) * token_head
    k = norm_and_rotate(k_heads, k_weight, cosine, sine, eps, is_new, HEAD_DIM, BLOCK_D)  # [1, D]
    v = tl.load(k_heads + kv_heads * token_head + dims, mask=is_new, other=0.0)
    slot = tl.load(slots + sequence)
    tl.store(keys + slot * k_slot + dims, k, mask=is_new)
    tl.store(values + slot * v_slot + dims, v, mask=is_new)
    score = tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1, keep_dims=True)  # [G, 1]
    score = tl.where(split == 0, score, float("-inf"))

    largest, total, acc = attend_split(
        repeat(q, BLOCK_M // BLOCK_G), keys, values, page_table + row * table_row, first, end, scale, k_slot, v_slot,
        HEAD_DIM, PAGE_SIZE, BLOCK_M, BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip
    weights, largest, total, acc = softmax_step(repeat(score, BLOCK_M // BLOCK_G), scale, largest, total, acc)
    acc += weights * v.to(tl.float32)
    store_result(
        largest, total, acc, out, partials, log_sums, arrivals, row, sequence, kv_head, split, used,
        GROUP, HEAD_DIM, NUM_SPLITS, BLOCK_M, BLOCK_D,
    )  # fmt: skip


def qkv_decode(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    kv_lens: torch.Tensor,
    scale: float,
    window: int = 0,
) -> torch.Tensor:
    """See reference.qkv_decode. A slot must be that of the sequence's last token: nothing checks it on a GPU.

    Launches on one device must follow one another, as those of paged_decode, with which they share counters.

    Raises:
        ValueError: one weight without the other, shapes that do not belong together, or a dtype, layout or device that
            the kernel does not know.
        RuntimeError: the first call that splits sequences is captured in a CUDA graph.
    """
    op, tokens = "qkv_decode", len(qkv)
    heads = qkv.shape[1] - 2 * keys.shape[1]
    if heads <= 0:
        refuse(op, f"{qkv.shape[1]} heads of q, k and v, of which {keys.shape[1]} are k and as many v")
    check_paged(op, qkv[:, :heads], keys, values)
    require(op, qkv, q_weight, k_weight, cos, sin)
    _check_angles(op, tokens, qkv.shape[2], cos, sin)
    if (q_weight is None) != (k_weight is None):
        refuse(op, "q and k are normalised both or neither")
    if slots.dtype != torch.int64 or slots.shape != (tokens,) or not slots.is_contiguous():
        refuse(op, f"slots are {list(slots.shape)} {slots.dtype}, not [{tokens}] int64")
    if len(kv_lens) != tokens or len(page_table) != tokens:
        refuse(op, f"{tokens} tokens for {len(kv_lens)} lengths and {len(page_table)} page tables, not one each")
    out = qkv.new_empty(tokens, heads, qkv.shape[2])
    if not tokens:
        return out
    grid, scratch, constants = plan(out, keys, tokens)
    qkv_decode_kernel[grid](
        qkv, q_weight, k_weight, cos, sin, keys, values, slots, out, *scratch, page_table, kv_lens, eps, scale * LOG2_E,
        page_table.stride(0), *qkv.stride()[:2], cos.stride(0), *keys.stride()[:2], *values.stride()[:2],
        PAGE_SIZE=page_size, WINDOW=window, **constants, **overlap(qkv_decode_kernel, qkv.device),
    )  # fmt: skip
    return out


_TYPES = {name: kind for name, kind in decode._TYPES.items() if name not in ("q", "query_starts")}
_TYPES |= {"qkv": "*", "cos": "*", "sin": "*", "slots": "*i64", "eps": "fp32"}
_SHAPE = {name: value for name, value in decode._SHAPE.items() if name not in ("q_row", "q_head")}
_SHAPE |= {"token_row": 4096, "token_head": 128, "angle_row": 64, "BLOCK_M": 16}
_WEIGHTS, _NO_WEIGHTS = {"q_weight": "*", "k_weight": "*"}, {"q_weight": None, "k_weight": None}
COMPILE_CASES = [
    CompileCase(
        qkv_decode_kernel,
        types | {"table_row": "i32"},
        _SHAPE
        | ({} if "q_weight" in types else _NO_WEIGHTS | {"HEAD_DIM": 80, "GROUP": 3})
        | {"NUM_SPLITS": num_splits, "BLOCK_N": 64 // (1 + (types["qkv"] == "*fp32"))}
        | {"PRECISION": "ieee" if types["qkv"] == "*fp32" else "tf32"},
        num_warps=2,
    )
    for types in (*each_dtype(_TYPES | _WEIGHTS), *each_dtype(_TYPES))
    for num_splits in (1, 64)
]
