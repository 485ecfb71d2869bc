"""CUDA graphs of whole steps: recorded once, replayed with one launch from the host.

A graph replays kernels with the sizes and addresses that they were recorded with. So steps are padded to one of a few
sizes, and read and write memory that stays where it is. Knows no requests. Idea: vLLM and SGLang capture the decoder by
batch size; here the graph goes from the rows to the sampled tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from minisgl_kernels.graphs import new_graph

Step = Callable[[], torch.Tensor]  # runs on memory that stays, and returns the tokens that it chose


def buckets(most: int) -> list[int]:
    """Sizes to pad a batch to, rising to `most`, so that there is one for every batch: small steps where they count."""
    fine, coarse = [1, 2, 4, *range(8, 256, 8)], range(256, most, 32)
    return [size for size in [*fine, *coarse] if size < most] + [most]


def token_buckets(most: int) -> list[int]:
    """Sizes to pad the tokens of a step with prompts to, up to `most`: closer where a padded token costs more than a
    launch from the host."""
    return [n for n in (64, 128, 256, *(n << i for i in range(16) for n in (512, 768))) if n <= most]


def bucket_for(n: int, sizes: Sequence[int]) -> int:
    """The smallest of the rising sizes that holds n; 0 if none does."""
    i = bisect_left(sizes, n)
    return sizes[i] if i < len(sizes) else 0


class StepGraphs:
    """The graphs of an engine, by whatever names the kind of a step.

    They share one pool of memory, since no two of them run at once: what a replay leaves there holds until the next.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = None
        self._graphs: dict[Hashable, tuple[Any, torch.Tensor]] = {}
        self.before_replay: Callable[[Any], object] | None = None  # called with the key
        self.open_pool()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def __len__(self) -> int:
        return len(self._graphs)

    def open_pool(self) -> None:
        """Take a new pool while no graph is held: that of a first capture that failed is gone."""
        if not self._graphs and self.device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()

    def capture(self, key: Hashable, step: Step) -> None:
        """Record a step. It runs before, for real: what compiles or allocates at its first run must not be recorded."""
        graph = new_graph(self.device, self._pool)
        graph.warm_up(step)
        self._graphs[key] = graph, graph.capture(step)

    def replay(self, key: Hashable) -> torch.Tensor:
        """Run a recorded step again; returns the memory in which its tokens will be."""
        graph, tokens = self._graphs[key]
        if self.before_replay:
            self.before_replay(key)
        graph.replay()
        return tokens
