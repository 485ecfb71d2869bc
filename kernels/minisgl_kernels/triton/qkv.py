"""From the qkv projection to attention: norms of q and k, rotation, and K and V to their slots, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl_kernels.triton.cases import CompileCase, each_dtype, refuse, require


@triton.jit
def load_halves(ptr, half: tl.constexpr, mask):
    """Both halves of rows whose first half starts at ptr; 0 where masked."""
    return tl.load(ptr, mask=mask, other=0.0), tl.load(ptr + half, mask=mask, other=0.0)


@triton.jit
def store_halves(ptr, first, second, half: tl.constexpr, mask):
    """Write both halves of rows whose first half starts at ptr."""
    tl.store(ptr, first, mask=mask)
    tl.store(ptr + half, second, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def qk_norm_rope_store_kernel(
    qkv_ptr,  # [T, heads + 2 · kv_heads, head_dim]
    q_weight_ptr,  # [head_dim], or None
    k_weight_ptr,  # [head_dim], or None
    cos_ptr,  # [T, head_dim / 2]
    sin_ptr,  # [T, head_dim / 2]
    slots_ptr,  # [T] int64
    q_ptr,  # [T, heads, head_dim]
    keys_ptr,  # [slots, kv_heads, head_dim]
    values_ptr,  # [slots, kv_heads, head_dim]
    token_stride,
    angle_stride,
    slot_stride,
    rows,
    eps,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_rows: tl.constexpr,
    block_half: tl.constexpr,
):
    """Bring block_rows rows to where attention reads them; a row is one head of one token, of q, k or v.

    A row is read as two halves, so that both elements that are rotated together lie in the same thread. v passes
    through as it is: it differs from k in that, and in where it is stored.
    """
    all_heads: tl.constexpr = heads + 2 * kv_heads
    half: tl.constexpr = head_dim // 2
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)  # [block_rows]
    slot = tl.load(slots_ptr + row // all_heads, mask=row < rows, other=0)[:, None]  # [block_rows, 1]
    row, column = row[:, None], tl.arange(0, block_half)[None, :]  # [block_rows, 1], [1, block_half]
    token, head = (row // all_heads).to(tl.int64), row % all_heads
    inside = (row < rows) & (column < half)  # [block_rows, block_half]
    is_q, is_k, is_v = head < heads, (head >= heads) & (head < heads + kv_heads), head >= heads + kv_heads

    source = qkv_ptr + token * token_stride + head * head_dim + column
    first, second = load_halves(source, half, inside)
    angle = token * angle_stride + column
    cos = tl.load(cos_ptr + angle, mask=inside & (is_q | is_k), other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=inside & (is_q | is_k), other=0.0).to(tl.float32)

    x, y = first.to(tl.float32), second.to(tl.float32)
    if q_weight_ptr is not None:
        q_first, q_second = load_halves(q_weight_ptr + column, half, inside & is_q)
        k_first, k_second = load_halves(k_weight_ptr + column, half, inside & is_k)
        inverse_rms = tl.rsqrt(tl.sum(x * x + y * y, axis=1, keep_dims=True) / head_dim + eps)  # [block_rows, 1]
        x = ((x * inverse_rms).to(first.dtype) * tl.where(is_q, q_first, k_first)).to(tl.float32)
        y = ((y * inverse_rms).to(first.dtype) * tl.where(is_q, q_second, k_second)).to(tl.float32)
    x, y = (x * cos - y * sin).to(first.dtype), (y * cos + x * sin).to(first.dtype)

    to_q = q_ptr + (token * heads + head) * head_dim + column
    to_k = keys_ptr + slot * slot_stride + (head - heads) * head_dim + column  # 64 bits, as slot has
    to_v = values_ptr + slot * slot_stride + (head - heads - kv_heads) * head_dim + column
    store_halves(to_q, x, y, half, inside & is_q)
    store_halves(to_k, x, y, half, inside & is_k)
    store_halves(to_v, first, second, half, inside & is_v)


@triton.jit(do_not_specialize=["rows"])
def apply_rope_kernel(
    x_ptr,  # [T, heads, head_dim]
    cos_ptr,  # [T, head_dim / 2]
    sin_ptr,  # [T, head_dim / 2]
    out_ptr,  # [T, heads, head_dim]
    token_stride,
    head_stride,
    angle_stride,
    rows,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_rows: tl.constexpr,
    block_half: tl.constexpr,
):
    """Rotate block_rows rows; a row is one head of one token."""
    half: tl.constexpr = head_dim // 2
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)[:, None]  # [block_rows, 1]
    column = tl.arange(0, block_half)[None, :]  # [1, block_half]
    token, head = (row // heads).to(tl.int64), row % heads
    inside = (row < rows) & (column < half)  # [block_rows, block_half]
    source = x_ptr + token * token_stride + head * head_stride + column
    first, second = load_halves(source, half, inside)
    cos = tl.load(cos_ptr + token * angle_stride + column, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * angle_stride + column, mask=inside, other=0.0).to(tl.float32)
    to = out_ptr + row.to(tl.int64) * head_dim + column
    x, y = first.to(tl.float32), second.to(tl.float32)
    x, y = (x * cos - y * sin).to(first.dtype), (y * cos + x * sin).to(first.dtype)
    store_halves(to, x, y, half, inside)


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
    qk_norm_rope_store_kernel[triton.cdiv(rows, blocks["block_rows"]),](
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
    apply_rope_kernel[triton.cdiv(rows, blocks["block_rows"]),](
        x, cos, sin, out, x.stride(0), x.stride(1), cos.stride(0), rows, heads, head_dim, **blocks
    )
    return out


def head_blocks(head_dim: int) -> dict[str, int]:
    """Rows a program and their padded half: each of 128 threads loads 16 elements of either half at once."""
    block_half = triton.next_power_of_2(head_dim // 2)
    return {"block_rows": max(1, 2048 // block_half), "block_half": block_half, "num_warps": 4}


def _check_angles(op: str, tokens: int, head_dim: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
    shape = (tokens, head_dim // 2)
    if head_dim % 2 or cos.shape != shape or sin.shape != shape or cos.stride(0) != sin.stride(0):
        refuse(op, f"cos {list(cos.shape)} and sin {list(sin.shape)} are not both [{tokens}, {head_dim} / 2]")


_ANGLES = {"cos_ptr": "*", "sin_ptr": "*", "token_stride": "i32/16", "angle_stride": "i32/16", "rows": "i32"}
_STORE = _ANGLES | {"qkv_ptr": "*", "slots_ptr": "*i64", "q_ptr": "*", "keys_ptr": "*", "values_ptr": "*"}
_STORE |= {"slot_stride": "i32/16", "eps": "fp32"}
_WEIGHTS = {"q_weight_ptr": "*", "k_weight_ptr": "*"}
_ROPE = _ANGLES | {"x_ptr": "*", "out_ptr": "*", "head_stride": "i32/16"}


def _case(kernel: object, types: dict[str, str], head_dim: int, **constants: int | None) -> CompileCase:
    blocks = head_blocks(head_dim)
    num_warps = blocks.pop("num_warps")
    return CompileCase(kernel, types, {**constants, "head_dim": head_dim, **blocks}, num_warps)


COMPILE_CASES = [
    _case(qk_norm_rope_store_kernel, types, head_dim, heads=heads, kv_heads=kv_heads)
    for types in each_dtype(_STORE | _WEIGHTS)
    for heads, kv_heads, head_dim in ((16, 8, 128), (8, 2, 256))
]
COMPILE_CASES += [
    _case(
        qk_norm_rope_store_kernel, types, head_dim, heads=heads, kv_heads=kv_heads, q_weight_ptr=None, k_weight_ptr=None
    )
    for types in each_dtype(_STORE)
    for heads, kv_heads, head_dim in ((32, 32, 128), (9, 3, 64), (32, 8, 80))
]
COMPILE_CASES += [_case(apply_rope_kernel, types, 128, heads=24) for types in each_dtype(_ROPE)]
