"""Sequences of any lengths in a pool of shuffled pages whose unused slots hold NaN, made without the tasks."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from minisgl.core import PagedRows
from minisgl.kvcache.mha_pool import MHAPool

NOWHERE = 10**9  # in the page table behind a sequence's pages: whoever reads it fails


@dataclass
class Sequence:
    """`total` tokens, of which the last `new` are computed in this step."""

    new: int
    total: int
    pages: list[int]
    page_size: int

    @property
    def slots(self) -> list[int]:
        """By the definition: token p lies in page p // page_size of the table, at place p % page_size."""
        size = self.page_size
        return [self.pages[p // size] * size + p % size for p in range(self.total)]


def sequences(spans: list[tuple[int, int]], page_size: int, first_page: int = 1, seed: int = 0) -> list[Sequence]:
    """Sequences of these (new, total), their pages drawn from all the pool, page 0 left out."""
    counts = [-(-total // page_size) for _, total in spans]
    free = list(range(first_page, first_page + sum(counts) + 3))
    random.Random(seed).shuffle(free)
    return [
        Sequence(new, total, [free.pop() for _ in range(count)], page_size)
        for (new, total), count in zip(spans, counts, strict=True)
    ]


def rows_of(step: list[Sequence]) -> PagedRows:
    """The step as the attention backend gets it."""
    width = max(len(s.pages) for s in step)
    return PagedRows(
        slots=torch.tensor([slot for s in step for slot in s.slots[-s.new :]]),
        page_table=torch.tensor([s.pages + [NOWHERE] * (width - len(s.pages)) for s in step]),
        query_lens=[s.new for s in step],
        kv_lens=[s.total for s in step],
        query_starts=torch.tensor([0, *(s.new for s in step)]).cumsum(0),
        device_kv_lens=torch.tensor([s.total for s in step]),
    )


def nan_pool(step: list[Sequence], layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> MHAPool:
    """A pool that is large enough for the step and holds nothing but NaN."""
    num_pages = max(page for s in step for page in s.pages) + 2
    pool = MHAPool(layers, num_pages, step[0].page_size, kv_heads, head_dim, dtype, torch.device("cpu"))
    pool.kv.fill_(float("nan"))
    return pool
