"""Small scenes: requests and steps by hand, rows, a runner over a tiny model. On a GPU if there is one.

A step is a list of (request, position of its first token, number of tokens). Pages hold 4 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from minisgl_kernels import attend, reference

from minisgl.attention.torch_backend import TorchAttention
from minisgl.core import Batch, ForwardBatch, PagedRows, Request, SamplingParams, WorkCounts
from minisgl.engine.rows import DeviceRows, Mailbox
from minisgl.engine.runner import StepRunner
from minisgl.kvcache.mha_pool import MHAPool, slots_of
from minisgl.models.llama import LlamaForCausalLM

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE = 4
MAX_LEN = 32


def new_request(row: int, prompt: int, pages: Sequence[int] = (), **params: Any) -> Request:
    """A running request with a prompt of so many tokens that nobody else has."""
    tokens = [(row + 1) * 20 + i for i in range(prompt)]
    request = Request(row, tokens, SamplingParams(max_tokens=100, **params), seed=1000 + row)
    request.row, request.pages = row, list(pages)
    return request


def new_rows(max_rows: int = 6) -> DeviceRows:
    return DeviceRows(max_rows, MAX_LEN, PAGE, DEVICE)


def step(*parts: tuple[Request, int, int], moved: Sequence[tuple[Request, int]] = ()) -> Batch:
    """A planned step."""
    requests, starts, num_tokens = zip(*parts, strict=True)
    return Batch(list(requests), list(starts), list(num_tokens), list(moved))


def pages_of(rows: DeviceRows, row: int, n: int) -> list[int]:
    """The first n pages of a row's table on the device."""
    return rows.page_tables[row, :n].tolist()


class Sent:
    """Notes what the host sends: for each copy, how many integers each of its parts has."""

    def __init__(self, monkeypatch: Any) -> None:
        self.copies: list[list[int]] = []
        send = Mailbox.send

        def noted(mailbox: Mailbox, parts: Sequence[Sequence[int]], to: torch.Tensor | None = None) -> Any:
            self.copies.append([len(part) for part in parts])
            return send(mailbox, parts, to)

        monkeypatch.setattr(Mailbox, "send", noted)


class ChunkAttention:
    """Attention of any number of queries a sequence in a step of fixed shapes, so that chunks fit into a graph too."""

    takes_chunks = True

    def __init__(self, pool: MHAPool, rows: PagedRows, work: WorkCounts | None = None) -> None:
        self.pool, self.rows = pool, rows
        starts, tokens = rows.query_starts, torch.arange(len(rows.slots), device=rows.slots.device)
        sequences = (torch.searchsorted(starts, tokens, right=True) - 1).clamp(max=len(starts) - 2)  # [T]
        self.places = torch.arange(rows.page_table.shape[1] * pool.page_size, device=tokens.device)  # [S]
        tables = rows.page_table[sequences]
        self.slots = slots_of(tables, self.places.expand(len(tables), -1), pool.page_size)  # [T, S]

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, batch: ForwardBatch
    ) -> torch.Tensor:
        self.pool.store(layer, k, v, self.rows.slots)
        keys, values = self.pool.layer(layer)
        seen = self.places <= batch.positions.unsqueeze(1)  # [T, S]
        slots = torch.where(seen, self.slots, self.slots[:, :1])  # what is not seen may be NaN
        return attend(q.unsqueeze(1), keys[slots], values[slots], seen[:, None, None, :]).squeeze(1)


def new_runner(model: LlamaForCausalLM, places: int = 6, in_graph: Any = None) -> StepRunner:
    """A runner over a pool of 40 pages full of NaN.

    Args:
        in_graph: the attention of its graphs, captured when they are first met; None runs every step eagerly.
    """
    shape = model.config
    sizes = (shape.num_layers, 40, PAGE, shape.num_kv_heads, shape.head_dim)
    pool = MHAPool(*sizes, model.dtype, DEVICE)
    pool.kv[:, :, 1:] = float("nan")  # what is read before it was written shows
    runner = StepRunner(model, pool, new_rows(places), TorchAttention, reference, WorkCounts())
    if in_graph:
        runner.use_graphs(in_graph, lazily=True, most_tokens=128)
    return runner


@torch.inference_mode()
def eager(runner: StepRunner, batch: Batch) -> list[int]:
    """Run a step kernel by kernel; the tokens that it chose."""
    return runner._eager(batch, filtered=False, by_host=False).tolist()


@torch.inference_mode()
def replayed(runner: StepRunner, batch: Batch) -> list[int]:
    """Run a step from its graph; the tokens that it chose, without those of padding."""
    key = runner._key(batch, False)
    assert key is not None, "no graph holds this step"
    return runner._replay(batch, key)[: len(batch.requests)].tolist()


def learn(batch: Batch, tokens: Sequence[int]) -> None:
    """Take in the tokens of a step, as a scheduler would."""
    for (request, start, n), token in zip(batch, tokens, strict=True):
        if start + n == len(request.tokens):
            request.tokens.append(token)
