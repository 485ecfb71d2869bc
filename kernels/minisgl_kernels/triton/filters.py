"""Where top-k, top-p and min-p end in each row of logits, found without a sort.

Each filter keeps a head of the order (logit down, id up), so the three together are one place in it: the last logit
that is kept, and the last token that has it. Bisection over the bits of a float finds it: up to 32 passes for top-k and
as many for top-p (16 in 16 bits), of which the first brings the row into the L2 cache. min-p needs one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl_kernels.triton.cases import CompileCase, each_dtype
from minisgl_kernels.triton.pdl import overlap, wait_for_previous

_LOG2_E = tl.constexpr(1.4426950408889634)
_UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # low ones of an fp32 that holds this dtype
_BLOCK, _WARPS = 8192, 16


@triton.jit
def scale_of(temperature):
    """What logits are multiplied by so that they count in powers of two; 1 for a greedy row, whose order is enough."""
    return tl.where(temperature > 0, _LOG2_E / tl.maximum(temperature, 1e-30), 1.0)


@triton.jit
def logit_of(key, UNUSED_BITS: tl.constexpr):
    """The logit with this order key: the bits of an fp32, low bits that are always the same left out.

    Negative floats have theirs inverted, so that keys have the order of the logits.
    """
    bits = key << UNUSED_BITS
    bits = tl.where(bits < 0, bits ^ (0x7FFFFFFF - ((1 << UNUSED_BITS) - 1)), bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def key_of(logit, UNUSED_BITS: tl.constexpr):
    """The inverse of logit_of."""
    bits = logit.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> UNUSED_BITS


@triton.jit
def row_maximum(row_logits, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit of a row."""
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, VOCAB, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        x = tl.load(row_logits + tokens, mask=tokens < VOCAB, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, x)
    return tl.max(largest, axis=0)


@triton.jit
def mass_above(row_logits, limit, best, scale, COUNT: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The tokens of a row whose logits are above a limit: their weight relative to the best one's, or their number."""
    total = tl.full([BLOCK], 0.0, tl.float32)
    for start in range(0, VOCAB, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        x = tl.load(row_logits + tokens, mask=tokens < VOCAB, other=float("-inf")).to(tl.float32)
        if COUNT:
            total += tl.where(x > limit, 1.0, 0.0)
        else:
            total += tl.where(x > limit, tl.exp2((x - best) * scale), 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def last_key(
    row_logits, low, best, scale, enough,
    COUNT: tl.constexpr, VOCAB: tl.constexpr, UNUSED_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The smallest key from `low` up above which there is less than enough mass, and that mass, by bisection."""
    high, above = key_of(best, UNUSED_BITS), 0.0
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)  # the mean rounded down; low + high could overflow
        mass = mass_above(row_logits, logit_of(middle, UNUSED_BITS), best, scale, COUNT, VOCAB, BLOCK)
        if mass < enough:
            high, above = middle, mass
        else:
            low = middle + 1
    return high, above


@triton.jit
def nth_equal(row_logits, value, n, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The id of the n-th token of a row that has this logit, or of the last one if there are fewer."""
    seen, last = 0, -1
    for start in range(0, VOCAB, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        x = tl.load(row_logits + tokens, mask=tokens < VOCAB, other=float("nan")).to(tl.float32)
        equal = (x == value).to(tl.int32)
        rank = seen + tl.cumsum(equal, axis=0)
        last = tl.maximum(last, tl.max(tl.where((equal > 0) & (rank <= n), tokens, -1), axis=0))
        seen += tl.sum(equal, axis=0)
    return last


@triton.jit(do_not_specialize_on_alignment=["temperatures", "top_ks", "top_ps", "min_ps"])  # views: see sampling.py
def filter_kernel(
    logits, temperatures, top_ks, top_ps, min_ps,
    cut_logits, cut_tokens,  # [B] fp32 and int32, out: the last logit that is kept, and the last token that has it
    row_stride,
    VOCAB: tl.constexpr, UNUSED_BITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Find what top-k, top-p and min-p keep of a row, of which each keeps a head of the order (logit down, id up)."""
    wait_for_previous(PDL)
    row = tl.program_id(0)
    row_logits = logits + row.to(tl.int64) * row_stride
    temperature, min_p = tl.load(temperatures + row), tl.load(min_ps + row)
    top_k, top_p = tl.load(top_ks + row).to(tl.float32), tl.load(top_ps + row)  # exact: vocab < 2²⁴
    by_k, by_p = (top_k > 0) & (top_k < VOCAB), top_p < 1
    cut, last = float("-inf"), VOCAB
    if (temperature > 0) & (by_k | by_p | (min_p > 0)):
        best = row_maximum(row_logits, VOCAB, BLOCK)
        scale = scale_of(temperature)
        key, ties = key_of(tl.full([], float("-inf"), tl.float32), UNUSED_BITS), VOCAB * 1.0
        if by_k:
            key, above = last_key(row_logits, key, best, scale, top_k, True, VOCAB, UNUSED_BITS, BLOCK)
            ties = top_k - above
        if by_p:
            limit = logit_of(key, UNUSED_BITS)
            mass = mass_above(row_logits, limit, best, scale, False, VOCAB, BLOCK)
            if by_k:
                mass += ties * tl.exp2((limit - best) * scale)
            first = key
            key, above = last_key(row_logits, key, best, scale, top_p * mass, False, VOCAB, UNUSED_BITS, BLOCK)
            each = tl.exp2((logit_of(key, UNUSED_BITS) - best) * scale)
            needed = tl.maximum(tl.ceil((top_p * mass - above) / tl.maximum(each, 1e-37)), 1.0)
            ties = tl.where(key == first, tl.minimum(ties, needed), needed)
        cut = logit_of(key, UNUSED_BITS)
        least = best + tl.log2(min_p) / scale
        if least > cut:
            cut = least
        elif ties < VOCAB:
            last = nth_equal(row_logits, cut, ties, VOCAB, BLOCK)
    tl.store(cut_logits + row, cut)
    tl.store(cut_tokens + row, last)


def filter_ends(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last logit that the filters keep in each row, fp32 [B], and the last token that has it, int32 [B].

    See `reference.sample` for the arguments. A row that filters nothing ends at -inf, and costs no pass.
    """
    rows, vocab = logits.shape
    cut_logits, cut_tokens = temperature.new_empty(rows), temperature.new_empty(rows, dtype=torch.int32)
    filter_kernel[(rows,)](
        logits, temperature, top_k, top_p, min_p, cut_logits, cut_tokens, logits.stride(0),
        vocab, _UNUSED_BITS[logits.dtype], _BLOCK, num_warps=_WARPS, **overlap(filter_kernel, logits.device),
    )  # fmt: skip
    return cut_logits, cut_tokens


_TYPES = {"logits": "*", "temperatures": "*fp32", "top_ks": "*i64", "top_ps": "*fp32", "min_ps": "*fp32"}
_TYPES |= {"cut_logits": "*fp32", "cut_tokens": "*i32", "row_stride": "i32/16"}
COMPILE_CASES = [
    CompileCase(filter_kernel, types, {"VOCAB": 151936, "UNUSED_BITS": bits, "BLOCK": _BLOCK}, num_warps=_WARPS)
    for types, bits in zip(each_dtype(_TYPES), _UNUSED_BITS.values(), strict=True)
]
