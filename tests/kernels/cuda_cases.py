"""Problems for decode attention over pages, with their answers in fp64. As a script, a few of them on a GPU:

compute-sanitizer --tool memcheck python tests/kernels/cuda_cases.py
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


class Paged:
    """Sequences whose K and V lie in shuffled pages; what no sequence owns is NaN, and so is the output to begin with.

    Args:
        lens: keys of each sequence.
        group: query heads of a KV head.
        queries: of each sequence; by default 1.
        pad: elements between the rows of different tokens, in q as in K and V.
    """

    def __init__(
        self, lens, dtype, page_size=16, group=2, kv_heads=2, head_dim=64, queries=None, pad=0, seed=0, device="cpu"
    ):
        self.lens, self.page_size, self.scale = lens, page_size, head_dim**-0.5
        self.queries = queries or [1] * len(lens)
        generator = torch.Generator(device).manual_seed(seed)

        def random(*shape):
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        needed = [-(-length // page_size) for length in lens]
        pages = 1 + torch.randperm(sum(needed) + 2, generator=generator, device=device)
        self.page_table = torch.full((len(lens), max(needed) + 1), 2**40, device=device)  # beyond: not to be read
        slots, width = (sum(needed) + 3) * page_size, kv_heads * head_dim
        self.keys, self.values = (
            torch.full((slots, width + pad), torch.nan, dtype=dtype, device=device)[:, :width].view(
                slots, kv_heads, head_dim
            )
            for _ in range(2)
        )
        self.rows = []  # each sequence's slots
        for i, own in enumerate(pages[: sum(needed)].split(needed)):
            self.page_table[i, : needed[i]] = own
            positions = torch.arange(lens[i], device=device)
            self.rows.append(own[positions // page_size] * page_size + positions % page_size)
            self.keys[self.rows[i]] = random(lens[i], kv_heads, head_dim)
            self.values[self.rows[i]] = random(lens[i], kv_heads, head_dim)
        wide = random(sum(self.queries), group * width + pad)
        self.q = wide[:, : group * width].unflatten(1, (-1, head_dim))
        self.kv_lens = torch.tensor(lens, device=device)
        self.query_starts = torch.tensor([0, *itertools.accumulate(self.queries)], device=device)

    def run(self, decode, window=0, **options):
        """What `decode` (paged_decode) writes into an output of NaNs."""
        out = torch.full(self.q.shape, torch.nan, dtype=self.q.dtype, device=self.q.device)
        rows = (self.page_table, self.page_size, self.kv_lens, self.query_starts)
        returned = decode(self.q, self.keys, self.values, *rows, self.scale, window, out, **options)
        assert returned is out
        return out

    def expected(self, window=0):
        """[T, heads, head_dim] in fp64; NaN where a sequence has other than one query."""
        q = self.q.double()
        out = torch.full_like(q, torch.nan)
        for i, (length, queries) in enumerate(zip(self.lens, self.queries, strict=True)):
            if queries != 1:
                continue
            row, seen = sum(self.queries[:i]), self.rows[i][max(0, length - window) if window else 0 :]
            k, v = self.keys[seen].double(), self.values[seen].double()  # [S, kv_heads, head_dim]
            grouped = q[row].unflatten(0, (k.shape[1], -1))  # [kv_heads, group, head_dim]
            weights = (torch.einsum("kgd,skd->kgs", grouped, k) * self.scale).softmax(-1)
            out[row] = torch.einsum("kgs,skd->kgd", weights, v).flatten(0, 1)
        return out

    def check(self, decode, window=0, **options):
        """Fail unless `decode` gives the answer, and writes no row of a sequence with other than one query."""
        from tests.tolerances import CUDA_DECODE  # not needed in a script

        actual, expected = self.run(decode, window, **options).double(), self.expected(window)
        assert torch.equal(actual.isnan(), expected.isnan())
        CUDA_DECODE[self.q.dtype].check(actual.nan_to_num(), expected.nan_to_num())

    def error(self, decode, window=0, **options):
        """The largest difference from the answer, NaN if one is where the other is not."""
        actual, expected = self.run(decode, window, **options).double(), self.expected(window)
        if not torch.equal(actual.isnan(), expected.isnan()):
            return float("nan")
        return (actual - expected).nan_to_num().abs().max().item()


def main() -> int:
    """All steps over a few small shapes on the current GPU; returns 1 if a result is wrong."""
    from minisgl_kernels.cuda import STEPS, paged_decode

    shapes = [
        (torch.bfloat16, 16, 2, 128, [1, 15, 16, 17, 257], 0),
        (torch.float16, 1, 3, 80, [33, 300], 0),
        (torch.float32, 64, 8, 256, [5, 130], 0),
        (torch.float32, 3, 1, 96, [200, 31, 64], 40),
    ]
    worst = 0.0
    for dtype, page_size, group, head_dim, lens, window in shapes:
        if dtype == torch.bfloat16 and torch.cuda.get_device_capability() < (8, 0):
            continue
        paged = Paged(lens, dtype, page_size, group, head_dim=head_dim, device="cuda")
        for step, num_splits in [*((step, 0) for step in STEPS), (6, 1), (6, 5)]:
            error = paged.error(paged_decode, window, step=step, num_splits=num_splits)
            limit = 2e-2 if dtype == torch.bfloat16 else 2e-3
            worst = max(worst, error / limit if error == error else 1e9)
            print(f"step {step}, splits {num_splits}, {dtype}, head_dim {head_dim}, group {group}: {error:.1e}")
    torch.cuda.synchronize()
    return 0 if worst <= 1 else 1


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
    raise SystemExit(main())
