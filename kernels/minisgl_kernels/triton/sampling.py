"""A token for each row of logits in one pass over them: the two levels of `reference.sample`, a kernel each.

The first kernel reads all logits and leaves two numbers a block. The second chooses a block, and a token in it. Rows
with top-k, top-p or min-p are searched first for the last token that these keep (filters.py).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from minisgl_kernels.reference import SAMPLE_BLOCK
from minisgl_kernels.triton.cases import CompileCase, each_dtype, refuse, require
from minisgl_kernels.triton.filters import filter_ends, scale_of
from minisgl_kernels.triton.pdl import overlap, wait_for_previous

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
# Views of packed tensors, aligned or not by the number of rows: one compilation must serve all.
_UNALIGNED = ["temperatures", "seeds", "positions", "largest_out", "score_out", "largest_in", "score_in", "ids_out"]
_LOWEST = tl.constexpr(-3.4028234663852886e38)  # in fp32


@triton.jit
def mix_bits(x):
    """SplitMix64's finaliser: see reference."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def gumbel_noise(seed, position, counter):
    """Gumbel noise in powers of two, a function of three integers: see reference."""
    stream = mix_bits(seed.to(tl.uint64) + position.to(tl.uint64) * _GOLDEN)
    bits = mix_bits(stream + counter.to(tl.int64).to(tl.uint64) * _GOLDEN)
    uniform = ((bits >> 41).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2⁻²³
    return -tl.log2(-tl.log2(uniform))


@triton.jit
def load_kept(row_logits, tokens, cut_logits, cut_tokens, row, VOCAB: tl.constexpr, FILTERED: tl.constexpr):
    """The logits of these tokens in fp32; -inf for what is filtered out or outside the vocabulary."""
    x = tl.load(row_logits + tokens, mask=tokens < VOCAB, other=float("-inf"), eviction_policy="evict_first")
    x = x.to(tl.float32)
    if FILTERED:
        cut = tl.load(cut_logits + row)
        dropped = (x < cut) | ((x == cut) & (tokens > tl.load(cut_tokens + row)))  # so written, NaN stays
        x = tl.where(dropped, float("-inf"), x)
    return x


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def sample_blocks_kernel(
    logits,  # [B, vocab]
    temperatures, seeds, positions,  # [B]
    cut_logits, cut_tokens,  # [B], what filters keep ends here; read if FILTERED
    largest_out, score_out,  # [B, blocks] fp32
    row_stride,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, FILTERED: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Level 1, one program a block of a row: its largest logit, and the log-sum-exp relative to it with noise added."""
    wait_for_previous(PDL)
    block, row = tl.program_id(0), tl.program_id(1)
    temperature, seed, position = tl.load(temperatures + row), tl.load(seeds + row), tl.load(positions + row)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    row_logits = logits + row.to(tl.int64) * row_stride
    x = load_kept(row_logits, tokens, cut_logits, cut_tokens, row, VOCAB, FILTERED)  # [BLOCK]

    largest = tl.maximum(tl.max(x, axis=0), _LOWEST)  # finite, so that -inf less it stays -inf
    # The difference first: a tiny temperature makes products that rounding drives apart. NaN if a logit is NaN or +inf.
    total = tl.sum(tl.exp2((x - largest) * scale_of(temperature)), axis=0)
    score = tl.log2(total)  # -inf if all logits are
    noisy = score + gumbel_noise(seed, position, -1 - block)
    greedy = tl.where(total > 0, 0.0, score)  # the largest logit decides alone
    out = row * tl.num_programs(0) + block
    tl.store(largest_out + out, largest)
    tl.store(score_out + out, tl.where(temperature > 0, noisy, greedy))


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def sample_token_kernel(
    logits, temperatures, seeds, positions, cut_logits, cut_tokens,
    largest_in, score_in,  # [B, blocks] fp32
    ids_out,  # [B] int64
    row_stride,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, FILTERED: tl.constexpr, MOST_BLOCKS: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Level 2, one program a row: the block of the best score, and the best of its tokens with noise of their own."""
    wait_for_previous(PDL)
    row = tl.program_id(0)
    blocks = tl.cdiv(VOCAB, BLOCK)
    temperature, seed, position = tl.load(temperatures + row), tl.load(seeds + row), tl.load(positions + row)
    scale = scale_of(temperature)

    each = tl.arange(0, MOST_BLOCKS)
    largest = tl.load(largest_in + row * blocks + each, mask=each < blocks, other=_LOWEST)
    score = tl.load(score_in + row * blocks + each, mask=each < blocks, other=float("-inf"))
    score += (largest - tl.max(largest, axis=0)) * scale  # [MOST_BLOCKS]; the difference first, or a tiny T rounds it
    hopeless = (tl.max((score != score).to(tl.int32), axis=0) > 0) | (tl.max(score, axis=0) == float("-inf"))
    block = tl.minimum(tl.argmax(score, axis=0), blocks - 1)

    tokens = block * BLOCK + tl.arange(0, BLOCK)
    row_logits = logits + row.to(tl.int64) * row_stride
    x = load_kept(row_logits, tokens, cut_logits, cut_tokens, row, VOCAB, FILTERED)  # [BLOCK]
    x = (x - tl.load(largest_in + row * blocks + block)) * scale
    if temperature > 0:
        x += gumbel_noise(seed, position, tokens)
    token = block * BLOCK + tl.argmax(x, axis=0)
    tl.store(ids_out + row, tl.where(hopeless, -1, token).to(tl.int64))


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `reference.sample`.

    Raises:
        ValueError: parameters that are not contiguous, or what `cases.require` refuses.
    """
    require("sample", logits)
    for each in (temperature, seeds, positions, top_k, top_p, min_p):
        if each is not None and not each.is_contiguous():
            refuse("sample", "the parameters of the rows must be contiguous")
    rows, vocab = logits.shape
    stride, blocks = logits.stride(0), triton.cdiv(vocab, SAMPLE_BLOCK)
    cut_logits = cut_tokens = None
    if top_k is not None and top_p is not None and min_p is not None:
        cut_logits, cut_tokens = filter_ends(logits, temperature, top_k, top_p, min_p)
    largest, score = temperature.new_empty(2, rows, blocks)
    ids = seeds.new_empty(rows)
    given = (logits, temperature, seeds, positions, cut_logits, cut_tokens, largest, score)
    # One warp a block: its maximum and sum need no barrier, and the noise is computed once and not by each warp.
    sample_blocks_kernel[(blocks, rows)](
        *given, stride, vocab, SAMPLE_BLOCK, cut_logits is not None,
        num_warps=1, **overlap(sample_blocks_kernel, logits.device),
    )  # fmt: skip
    most = triton.next_power_of_2(blocks)
    sample_token_kernel[(rows,)](
        *given, ids, stride, vocab, SAMPLE_BLOCK, cut_logits is not None, most,
        num_warps=4, **overlap(sample_token_kernel, logits.device),
    )  # fmt: skip
    return ids


_TYPES = {"logits": "*", "temperatures": "*fp32", "seeds": "*i64", "positions": "*i64", "row_stride": "i32/16"}
_SIZES: dict[str, Any] = {"VOCAB": 151936, "BLOCK": SAMPLE_BLOCK}
_MODES: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({"cut_logits": "*fp32", "cut_tokens": "*i32"}, _SIZES | {"FILTERED": True}),
    ({}, _SIZES | {"FILTERED": False, "cut_logits": None, "cut_tokens": None}),
]
_KERNELS: list[tuple[Any, dict[str, str], dict[str, int], int]] = [
    (sample_blocks_kernel, {"largest_out": "*fp32", "score_out": "*fp32"}, {}, 1),
    (sample_token_kernel, {"largest_in": "*fp32", "score_in": "*fp32", "ids_out": "*i64"}, {"MOST_BLOCKS": 128}, 4),
]
COMPILE_CASES = [
    CompileCase(kernel, types | more_types, constants | more, num_warps=num_warps)
    for cuts, constants in _MODES
    for types in each_dtype(_TYPES | cuts)
    for kernel, more_types, more, num_warps in _KERNELS
]
