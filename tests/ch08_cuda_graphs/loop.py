"""Engines with a step in flight, and a log of what their loop does."""

from __future__ import annotations

from typing import Any

import torch

from minisgl.config import EngineConfig
from minisgl.core import Batch, Request, SamplingParams
from minisgl.engine.engine import Engine
from minisgl.engine.runner import Flight
from minisgl.models.llama import LlamaForCausalLM


def new_engine(model: LlamaForCausalLM, **switches: Any) -> Engine:
    """An engine on torch's ops with a small pool that is full of NaN, one step in flight unless told otherwise."""
    base = {
        "attention": "torch", "kernels": "torch", "graphs": "off", "overlap": "on", "page_size": 4, "kv_pages": 60,
        "max_model_len": 64, "max_running_requests": 6, "max_batch_tokens": 64,
    }  # fmt: skip
    engine = Engine(model, EngineConfig(**(base | switches)))
    engine.pool.kv[:, :, 1:] = float("nan")
    return engine


def new_request(
    id: int, prompt: int, max_tokens: int = 4, stop_ids: frozenset[int] = frozenset(), **params: Any
) -> Request:
    tokens = [(7 * id + 3 * i) % 101 for i in range(1, prompt + 1)]
    return Request(id, tokens, SamplingParams(max_tokens=max_tokens, **params), stop_ids)


def run(engine: Engine, *requests: Request, most: int = 500) -> list[list[int]]:
    """To the end; the answers."""
    for request in requests:
        engine.add(request)
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
        assert steps < most, "the engine does not come to an end"
    return [request.output for request in requests]


class Log:
    """Notes launches and reads of an engine, by the number of the step, and what in-flight steps still need."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.events, self.needed = engine, list[str](), dict[int, list[int]]()
        self._launch, self.steps = engine.launch, 0
        engine.launch = self.launch  # type: ignore[method-assign]

    def launch(self, batch: Batch) -> Flight:
        number, self.steps = self.steps, self.steps + 1
        self.events.append(f"launch {number}")
        self.needed[number] = [page for request in batch.requests for page in request.pages]
        flight = self._launch(batch)

        def tokens() -> list[int]:
            self.check_pages()
            self.events.append(f"read {number}")
            del self.needed[number]
            return flight.tokens()

        return Flight(batch, tokens)

    def check_pages(self) -> None:
        """No page that a step in flight reads or writes may be free."""
        for number, pages in self.needed.items():
            freed = [page for page in pages if not self.engine.pages.holders(page)]
            assert not freed, f"step {number} is in flight, and its pages {freed} are free"


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
