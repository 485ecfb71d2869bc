"""Bytes that the Triton kernels of chapters 6 and 7 move, counted in the interpreter: no GPU, no time.

Two kinds of rows, in results/ch06_score.json and ch07_score.json:
- source "interpreter": counted by `minisgl_kernels.triton.score` while the kernel runs at a small shape in fp16. Its
  score is moved / distinct: 1.0 if each byte moves once in its direction.
- source "formula": the same work as separate kernels, of which each reads its inputs and writes its outputs once, at
  the same shape and dtype. What lies between them is no part of the work: distinct is what is needed.
`needed` is inputs and outputs of the whole op, once each, and `per_needed` is moved / needed: the number to compare.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import argparse
import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.ch06_attention import with_splits
from benchmarks.record import save

DTYPE, SIZE = torch.float16, 2
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 4, 2, 32, 8  # two query heads to a KV head, as in Qwen3-0.6B
ROWS, HIDDEN, WIDTH = 16, 256, 512
LOGITS, VOCAB = 2, 32_000  # rows of logits
EPS, SCALE = 1e-6, HEAD_DIM**-0.5


@dataclass(frozen=True)
class Kernel:
    """A row that the interpreter counts.

    Args:
        run: launches it.
        needed: bytes of its inputs and outputs.
        splits: of each sequence, for decode; 0 leaves the choice.
    """

    name: str
    shape: str
    run: Callable[[], Any]
    needed: int
    splits: int = 0


def counted(kernel: Kernel) -> dict[str, Any]:
    """Run a kernel in the interpreter."""
    from minisgl_kernels.triton import score

    with ExitStack() as stack:
        if kernel.splits:
            stack.enter_context(with_splits(kernel.splits))
        kernel.run()  # once before: what an op makes at its first call and keeps is not its traffic
        moved = stack.enter_context(score.count_bytes())
        alive = kernel.run()
    del alive
    row = {"name": kernel.name, "shape": kernel.shape, "source": "interpreter", "read": moved.read}
    row |= {"written": moved.written, "moved": moved.moved, "distinct": moved.distinct, "score": moved.score}
    return row | {"needed": kernel.needed, "per_needed": moved.moved / kernel.needed}


def by_formula(name: str, shape: str, moved: int, needed: int) -> dict[str, Any]:
    """A row of separate kernels."""
    row = {"name": name, "shape": shape, "source": "formula", "moved": moved, "distinct": needed}
    return row | {"score": moved / needed, "needed": needed, "per_needed": moved / needed}


def attention_bytes(keys: Sequence[int], queries: Sequence[int]) -> int:
    """K and V of each sequence, its queries and its results."""
    return SIZE * HEAD_DIM * (2 * KV_HEADS * sum(keys) + 2 * HEADS * sum(queries))


def gather_then_attend(keys: Sequence[int], queries: Sequence[int]) -> int:
    """Chapter 3: K and V are read from the pool, written into a copy, and read from there."""
    kv = SIZE * HEAD_DIM * 2 * KV_HEADS * sum(keys)
    return attention_bytes(keys, queries) + 2 * kv


def paged(keys: Sequence[int], queries: Sequence[int]) -> tuple[Any, ...]:
    """Arguments of paged attention over shuffled pages; slots that nobody owns hold NaN."""
    generator = torch.Generator().manual_seed(0)
    counts = [-(-length // PAGE_SIZE) for length in keys]
    pages = 1 + torch.randperm(sum(counts), generator=generator)
    pool = torch.full((2, (sum(counts) + 1) * PAGE_SIZE, KV_HEADS, HEAD_DIM), torch.nan, dtype=DTYPE)
    table = torch.zeros(len(keys), max(counts), dtype=torch.int64)
    for row, own, length in zip(table, pages.split(counts), keys, strict=True):
        row[: len(own)] = own
        places = torch.arange(length)
        slots = own[places // PAGE_SIZE] * PAGE_SIZE + places % PAGE_SIZE
        pool[:, slots] = torch.randn(2, length, KV_HEADS, HEAD_DIM, generator=generator).to(DTYPE)
    q = torch.randn(sum(queries), HEADS, HEAD_DIM, generator=generator).to(DTYPE)
    starts = torch.tensor([0, *itertools.accumulate(queries)])
    return q, *pool, table, PAGE_SIZE, torch.tensor(keys), starts, SCALE


def attention() -> list[Kernel | dict[str, Any]]:
    """Chapter 6: decode of two sequences, and a chunk of one prompt."""
    from minisgl_kernels import triton

    keys, one = (300, 200), (1, 1)
    context, new = (96,), (64,)
    decode_args, chunk_args = paged(keys, one), paged(context, new)
    decode_shape, chunk_shape = "2 sequences of 300 and 200 keys", "64 new tokens of 96"
    decode_needed, chunk_needed = attention_bytes(keys, one), attention_bytes(context, new)
    return [
        *(
            Kernel(
                f"decode, {count} split{'s' * (count > 1)}", decode_shape,
                lambda: triton.paged_decode(*decode_args), decode_needed, count,
            )
            for count in (1, 4)
        ),
        by_formula("gather, then attend (chapter 3)", decode_shape, gather_then_attend(keys, one), decode_needed),
        Kernel("flash attention", chunk_shape, lambda: triton.flash_attention(*chunk_args), chunk_needed),
        by_formula("gather, then attend (chapter 3)", chunk_shape, gather_then_attend(context, new), chunk_needed),
    ]  # fmt: skip


def separate(op: str) -> int:
    """Bytes of an op's parts as kernels of their own, at the shapes of `fused`.

    add_rms_norm: an addition, then a norm of the sum. silu_and_mul: silu of one half, then a product with the other.
    qk_norm_rope_store: two norms, two rotations, and K and V copied into the pool. sample: logits / temperature in
    fp32, softmax (its maximum, its sum and its quotient as one kernel), noise for each logit, and argmax of both.
    """
    row, gate = SIZE * ROWS * HIDDEN, SIZE * ROWS * WIDTH
    q, kv = SIZE * ROWS * HEADS * HEAD_DIM, SIZE * ROWS * KV_HEADS * HEAD_DIM
    angles, logits = SIZE * ROWS * HEAD_DIM, SIZE * LOGITS * VOCAB
    return {
        "add_rms_norm": 3 * row + 2 * row + SIZE * HIDDEN,
        "silu_and_mul": 2 * gate + 3 * gate,
        "qk_norm_rope_store": 4 * (q + kv) + 2 * angles + 4 * kv + 2 * SIZE * HEAD_DIM + 2 * 8 * ROWS,
        "sample": logits * (1 + 2 + 4 + 2 + 4),  # each fp32 pass over them is as much as two in 16 bits
    }[op]


def fused() -> list[Kernel | dict[str, Any]]:
    """Chapter 7: each fused op, beside its parts as separate kernels."""
    from minisgl_kernels import triton
    from minisgl_kernels.fuser import activation, fuse, norm, residual

    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DTYPE)

    x, stream, weight, gate_up = randn(ROWS, HIDDEN), randn(ROWS, HIDDEN), randn(HIDDEN), randn(ROWS, 2 * WIDTH)
    qkv, q_weight, k_weight = randn(ROWS, HEADS + 2 * KV_HEADS, HEAD_DIM), randn(HEAD_DIM), randn(HEAD_DIM)
    cos, sin = randn(ROWS, HEAD_DIM // 2), randn(ROWS, HEAD_DIM // 2)
    keys, values = (torch.zeros(ROWS + 8, KV_HEADS, HEAD_DIM, dtype=DTYPE) for _ in range(2))
    slots, ids, embeddings = torch.randperm(ROWS + 8)[:ROWS], torch.randperm(100)[:ROWS], randn(100, HIDDEN)
    logits, seeds = randn(LOGITS, VOCAB), torch.arange(LOGITS)
    warm, cold = torch.full((LOGITS,), 0.6), torch.zeros(LOGITS)
    filters = (torch.full_like(seeds, 50), torch.full_like(warm, 0.9), torch.zeros_like(warm))
    own = fuse(residual(), norm(EPS), activation("silu"))

    row, gate, vocab = x.nbytes, gate_up.nbytes // 2, logits.nbytes
    store = 2 * qkv.nbytes + cos.nbytes + sin.nbytes + q_weight.nbytes + k_weight.nbytes + slots.nbytes
    plain, few = f"{ROWS} rows of {HIDDEN}", f"{LOGITS} rows of {VOCAB:,}"
    heads = f"{ROWS} tokens, {HEADS} + 2 · {KV_HEADS} heads of {HEAD_DIM}"
    add, silu = 4 * row + weight.nbytes, 3 * gate
    qk = lambda: triton.qk_norm_rope_store(qkv, q_weight, k_weight, EPS, cos, sin, keys, values, slots)  # noqa: E731
    pick = lambda temperature, *more: triton.sample(logits, temperature, seeds, seeds, *more)  # noqa: E731
    return [
        Kernel("rms_norm", plain, lambda: triton.rms_norm(x, weight, EPS), 2 * row + weight.nbytes),
        Kernel("add_rms_norm", plain, lambda: triton.add_rms_norm(x, stream, weight, EPS), add),
        by_formula("add, norm", plain, separate("add_rms_norm"), add),
        Kernel("silu_and_mul", f"{ROWS} rows of 2 · {WIDTH}", lambda: triton.silu_and_mul(gate_up), silu),
        by_formula("silu, mul", f"{ROWS} rows of 2 · {WIDTH}", separate("silu_and_mul"), silu),
        Kernel("qk_norm_rope_store", heads, qk, store),
        by_formula("norms, rotations, stores", heads, separate("qk_norm_rope_store"), store),
        Kernel("embedding", plain, lambda: triton.embedding(ids, embeddings), 2 * row + ids.nbytes),
        Kernel("sample, temperature", few, lambda: pick(warm), vocab),
        by_formula("scale, softmax, noise, argmax", few, separate("sample"), vocab),
        Kernel("sample, greedy", few, lambda: pick(cold), vocab),
        Kernel("sample, top-k and top-p", few, lambda: pick(warm, *filters), vocab),
        Kernel("generated: residual + norm + silu", plain, lambda: own(x, stream, weight), 3 * row + weight.nbytes),
        by_formula("residual, norm, silu", plain, 3 * row + 2 * row + weight.nbytes + 2 * row, 3 * row + weight.nbytes),
    ]


CHAPTERS = {6: ("ch06_score", attention), 7: ("ch07_score", fused)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chapters", type=int, nargs="+", choices=CHAPTERS, default=list(CHAPTERS))
    args = parser.parse_args()
    for chapter in args.chapters:
        name, rows = CHAPTERS[chapter]
        found = [row if isinstance(row, dict) else counted(row) for row in tqdm(rows(), desc=name)]
        for row in found:
            print(f"{row['name']:36} {row['moved']:>9,} B moved {row['score']:6.2f} {row['per_needed']:6.2f}")
        print(save(name, {"dtype": "float16", "kernels": found}))


if __name__ == "__main__":
    main()
