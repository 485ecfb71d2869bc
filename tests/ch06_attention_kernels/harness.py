"""Attention over pages with its answer in fp64: shuffled pages, NaN in every slot and gap that nobody owns."""

from __future__ import annotations

import itertools

import torch

from tests.tolerances import TILED_ATTENTION


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


class Scene:
    """Sequences of `lens` tokens, of which the last `queries` are computed in this step (1 unless told).

    K and V lie in wider rows of different widths, so that their strides differ; what lies between is NaN. Behind a
    sequence's pages its table holds numbers of pages that do not exist.
    """

    def __init__(
        self, lens, queries=None, page_size=4, group=2, kv_heads=2, head_dim=16, dtype=torch.float32, window=0, seed=0
    ):
        self.lens, self.queries = lens, queries or [1] * len(lens)
        self.page_size, self.window, self.scale = page_size, window, head_dim**-0.5
        generator = torch.Generator().manual_seed(seed)
        needed = [-(-length // page_size) for length in lens]
        pages = torch.randperm(sum(needed) + 3, generator=generator)[: sum(needed)] + 1
        slots = (sum(needed) + 4) * page_size
        self.page_table = torch.full((len(lens), max(needed) + 1), 10**9)
        self.places = []  # each sequence's slots
        for i, own in enumerate(pages.split(needed)):
            self.page_table[i, : needed[i]] = own
            at = torch.arange(lens[i])
            self.places.append(own[at // page_size] * page_size + at % page_size)

        def pool(gap):
            wide = torch.full((slots, kv_heads * head_dim + gap), torch.nan, dtype=dtype, device=device())
            rows = wide[:, : kv_heads * head_dim].view(slots, kv_heads, head_dim)
            for own in self.places:
                rows[own] = torch.randn(len(own), kv_heads, head_dim, generator=generator).to(rows)
            return rows

        self.keys, self.values = pool(8), pool(24)
        heads, tokens = kv_heads * group, sum(self.queries)
        wide = torch.randn(tokens, heads + 2 * kv_heads, head_dim, generator=generator)
        self.q = wide.to(device(), dtype)[:, :heads]  # as it lies beside k and v
        self.starts = [0, *itertools.accumulate(self.queries)]

    def arguments(self):
        """What the kernels' wrappers take, up to the window."""
        table, lens, starts = (torch.as_tensor(x, device=device()) for x in (self.page_table, self.lens, self.starts))
        return self.q, self.keys, self.values, table, self.page_size, lens, starts, self.scale, self.window

    def blank(self):
        """An output that shows which rows were not written."""
        return torch.full(self.q.shape, torch.nan, dtype=self.q.dtype, device=self.q.device)

    def answer(self):
        """[T, heads, head_dim] in fp64 on the CPU, one query after the other."""
        q, keys, values = (x.cpu().double() for x in (self.q, self.keys, self.values))
        out = torch.empty(q.shape, dtype=torch.float64)
        for i, (length, new) in enumerate(zip(self.lens, self.queries, strict=True)):
            for t in range(new):
                end = length - new + t + 1
                seen = self.places[i][max(0, end - self.window) if self.window else 0 : end]
                grouped = q[self.starts[i] + t].unflatten(0, (keys.shape[1], -1))  # [kv_heads, group, head_dim]
                weights = (torch.einsum("kgd,skd->kgs", grouped, keys[seen]) * self.scale).softmax(-1)
                out[self.starts[i] + t] = torch.einsum("kgs,skd->kgd", weights, values[seen]).flatten(0, 1)
        return out

    def check(self, out, why="", sequences=None, atol=None) -> None:
        """Fail unless the rows of these sequences (of all) are the answer, and say which row is furthest from it."""
        __tracebackhide__ = True
        owners = [i for i, new in enumerate(self.queries) for _ in range(new)]
        chosen = [row for row, i in enumerate(owners) if sequences is None or i in sequences]
        errors = (out.cpu().double() - self.answer())[chosen].abs().nan_to_num(nan=torch.inf).amax((1, 2))
        row, error = chosen[int(errors.argmax())], errors.max().item()
        if error < (atol or TILED_ATTENTION[out.dtype].atol):
            return
        i = owners[row]
        place = f"sequence {i} of {self.lens[i]} keys, token {self.lens[i] - self.starts[i + 1] + row}"
        found = f"is off by {error:.3g}"
        if error == torch.inf:
            found = "holds NaN, which lies wherever nothing may be read, and is what was never written"
        raise AssertionError(f"the result of {place}, {found}. {why}".rstrip())
