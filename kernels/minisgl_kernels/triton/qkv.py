"""From the qkv projection to attention: norms of q and k, rotation, and K and V to their slots, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl_kernels.triton.cases import CompileCase, each_dtype, refuse, require
from minisgl_kernels.triton.pdl import overlap, wait_for_previous


@triton.jit
def load_halves(start, HALF: tl.constexpr, mask):
    """Both halves of rows whose first half begins at start; 0 where masked."""
    return tl.load(start, mask=mask, other=0.0), tl.load(start + HALF, mask=mask, other=0.0)


@triton.jit
def store_halves(start, first, second, HALF: tl.constexpr, mask):
    """Write both halves of rows whose first half begins at start."""
    tl.store(start, first, mask=mask)
    tl.store(start + HALF, second, mask=mask)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["slots"])  # a view of a packed tensor
def qk_norm_rope_store_kernel(
    qkv,  # [T, HEADS + 2 · KV_HEADS, HEAD_DIM]
    q_weight,  # [HEAD_DIM], or None
    k_weight,  # [HEAD_DIM], or None
    cos,  # [T, HEAD_DIM / 2]
    sin,  # [T, HEAD_DIM / 2]
    slots,  # [T] int64
    q_out,  # [T, HEADS, HEAD_DIM]
    keys,  # [slots, KV_HEADS, HEAD_DIM]
    values,  # [slots, KV_HEADS, HEAD_DIM]
    token_stride,
    angle_stride,
    slot_stride,
    rows,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Bring BLOCK_ROWS rows to where attention reads them; a row is one head of one token, of q, k or v.

    A row is read as two halves, so that both elements that are rotated together lie in the same thread. v passes
    through as it is: it differs from k in that, and in where it is stored.
    """
    wait_for_previous(PDL)
    ALL_HEADS: tl.constexpr = HEADS + 2 * KV_HEADS
    HALF: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # [BLOCK_ROWS]
    slot = tl.load(slots + row // ALL_HEADS, mask=row < rows, other=0)[:, None]  # [BLOCK_ROWS, 1]
    row, column = row[:, None], tl.arange(0, BLOCK_HALF)[None, :]  # [BLOCK_ROWS, 1], [1, BLOCK_HALF]
    token, head = (row // ALL_HEADS).to(tl.int64), row % ALL_HEADS
    inside = (row < rows) & (column < HALF)  # [BLOCK_ROWS, BLOCK_HALF]
    is_q, is_k, is_v = head < HEADS, (head >= HEADS) & (head < HEADS + KV_HEADS), head >= HEADS + KV_HEADS

    source = qkv + token * token_stride + head * HEAD_DIM + column
    first, second = load_halves(source, HALF, inside)
    angle = token * angle_stride + column
    cosine = tl.load(cos + angle, mask=inside & (is_q | is_k), other=0.0).to(tl.float32)
    sine = tl.load(sin + angle, mask=inside & (is_q | is_k), other=0.0).to(tl.float32)

    x, y = first.to(tl.float32), second.to(tl.float32)
    if q_weight is not None:
        weight = tl.where(is_q, q_weight, k_weight) + column
        w_first, w_second = load_halves(weight, HALF, inside & (is_q | is_k))
        inverse_rms = tl.rsqrt(tl.sum(x * x + y * y, axis=1, keep_dims=True) / HEAD_DIM + eps)  # [BLOCK_ROWS, 1]
        x = ((x * inverse_rms).to(first.dtype) * w_first).to(tl.float32)
        y = ((y * inverse_rms).to(first.dtype) * w_second).to(tl.float32)
    x, y = (x * cosine - y * sine).to(first.dtype), (y * cosine + x * sine).to(first.dtype)
    x, y = tl.where(is_v, first, x), tl.where(is_v, second, y)

    to_q = q_out + (token * HEADS + head) * HEAD_DIM + column
    to_k = keys + slot * slot_stride + (head - HEADS) * HEAD_DIM + column  # 64 bits, as slot has
    to_v = values + slot * slot_stride + (head - HEADS - KV_HEADS) * HEAD_DIM + column
    store_halves(tl.where(is_q, to_q, tl.where(is_k, to_k, to_v)), x, y, HALF, inside)


@triton.jit(do_not_specialize=["rows"])
def apply_rope_kernel(
    x,  # [T, HEADS, HEAD_DIM]
    cos,  # [T, HEAD_DIM / 2]
    sin,  # [T, HEAD_DIM / 2]
    out,  # [T, HEADS, HEAD_DIM]
    token_stride,
    head_stride,
    angle_stride,
    rows,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Rotate BLOCK_ROWS rows; a row is one head of one token."""
    HALF: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]  # [BLOCK_ROWS, 1]
    column = tl.arange(0, BLOCK_HALF)[None, :]  # [1, BLOCK_HALF]
    token, head = (row // HEADS).to(tl.int64), row % HEADS
    inside = (row < rows) & (column < HALF)  # [BLOCK_ROWS, BLOCK_HALF]
    source = x + token * token_stride + head * head_stride + column
    first, second = load_halves(source, HALF, inside)
    cosine = tl.load(cos + token * angle_stride + column, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sin + token * angle_stride + column, mask=inside, other=0.0).to(tl.float32)
    to = out + row.to(tl.int64) * HEAD_DIM + column
    a, b = first.to(tl.float32), second.to(tl.float32)
    a, b = (a * cosine - b * sine).to(first.dtype), (b * cosine + a * sine).to(first.dtype)
    store_halves(to, a, b, HALF, inside)


def qk_norm_rope_store(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """See `reference.qk_norm_rope_store`. Slots must differ and lie in the pool: nothing checks that on a GPU.

    Raises:
        ValueError: one weight without the other, heads that are not contiguous, shapes that do not belong together,
            or what `cases.require` refuses.
    """
    op = "qk_norm_rope_store"
    require(op, qkv, q_weight, k_weight, cos, sin, keys, values)
    tokens, all_heads, head_dim = qkv.shape
    kv_heads = keys.shape[1]
    if (q_weight is None) != (k_weight is None):
        refuse(op, "q and k are normalised both or neither")
    if qkv.stride(1) != head_dim or keys.stride(1) != head_dim:
        refuse(op, f"heads of {head_dim} lie {qkv.stride(1)} elements apart in qkv, {keys.stride(1)} in the pool")
    if keys.stride() != values.stride() or keys.shape != values.shape or keys.shape[2] != head_dim:
        refuse(op, f"keys {list(keys.shape)}, values {list(values.shape)}, heads of {head_dim}")
    if slots.dtype != torch.int64 or slots.shape != (tokens,) or not slots.is_contiguous():
        refuse(op, f"slots are {list(slots.shape)} {slots.dtype}, not [{tokens}] int64")
    _check_angles(op, tokens, head_dim, cos, sin)
    heads = all_heads - 2 * kv_heads
    q = qkv.new_empty(tokens, heads, head_dim)
    rows = tokens * all_heads
    blocks = head_blocks(head_dim)
    qk_norm_rope_store_kernel[triton.cdiv(rows, blocks["BLOCK_ROWS"]),](
        qkv,
        q_weight,
        k_weight,
        cos,
        sin,
        slots,
        q,
        keys,
        values,
        qkv.stride(0),
        cos.stride(0),
        keys.stride(0),
        rows,
        eps,
        heads,
        kv_heads,
        head_dim,
        **blocks,
        **overlap(qk_norm_rope_store_kernel, qkv.device),
    )
    return q


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See `reference.apply_rope`; x [T, heads, head_dim] may be a part of a larger tensor.

    Raises:
        ValueError: shapes that do not belong together, or what `cases.require` refuses.
    """
    require("apply_rope", x, cos, sin)
    tokens, heads, head_dim = x.shape
    _check_angles("apply_rope", tokens, head_dim, cos, sin)
    out = x.new_empty(x.shape)
    rows = tokens * heads
    blocks = head_blocks(head_dim)
    apply_rope_kernel[triton.cdiv(rows, blocks["BLOCK_ROWS"]),](
        x, cos, sin, out, x.stride(0), x.stride(1), cos.stride(0), rows, heads, head_dim, **blocks
    )
    return out


def head_blocks(head_dim: int) -> dict[str, int]:
    """Rows a program and their padded half: each of 64 threads loads 8 elements, 16 bytes in 16 bits, of either half.

    Small programs: on an H200, four times as many rows in twice as many warps took 16 % longer.
    """
    block_half = triton.next_power_of_2(head_dim // 2)
    return {"BLOCK_ROWS": max(1, 512 // block_half), "BLOCK_HALF": block_half, "num_warps": 2}


def _check_angles(op: str, tokens: int, head_dim: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
    shape = (tokens, head_dim // 2)
    if head_dim % 2 or cos.shape != shape or sin.shape != shape or cos.stride(0) != sin.stride(0):
        refuse(op, f"cos {list(cos.shape)} and sin {list(sin.shape)} are not both [{tokens}, {head_dim} / 2]")


_ANGLES = {"cos": "*", "sin": "*", "token_stride": "i32/16", "angle_stride": "i32/16", "rows": "i32"}
_STORE = _ANGLES | {"qkv": "*", "slots": "*i64", "q_out": "*", "keys": "*", "values": "*"}
_STORE |= {"slot_stride": "i32/16", "eps": "fp32"}
_WEIGHTS = {"q_weight": "*", "k_weight": "*"}
_ROPE = _ANGLES | {"x": "*", "out": "*", "head_stride": "i32/16"}


def _case(kernel: object, types: dict[str, str], head_dim: int, **constants: int | None) -> CompileCase:
    blocks = head_blocks(head_dim)
    num_warps = blocks.pop("num_warps")
    return CompileCase(kernel, types, {**constants, "HEAD_DIM": head_dim, **blocks}, num_warps)


COMPILE_CASES = [
    _case(qk_norm_rope_store_kernel, types, head_dim, HEADS=heads, KV_HEADS=kv_heads)
    for types in each_dtype(_STORE | _WEIGHTS)
    for heads, kv_heads, head_dim in ((16, 8, 128), (8, 2, 256))
]
COMPILE_CASES += [
    _case(qk_norm_rope_store_kernel, types, head_dim, HEADS=heads, KV_HEADS=kv_heads, q_weight=None, k_weight=None)
    for types in each_dtype(_STORE)
    for heads, kv_heads, head_dim in ((32, 32, 128), (9, 3, 64), (32, 8, 80))
]
COMPILE_CASES += [_case(apply_rope_kernel, types, 128, HEADS=24) for types in each_dtype(_ROPE)]
