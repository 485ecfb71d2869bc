"""Random traffic for property tests: who asks what and when, what is aborted, and how the engine is switched.

Everything is drawn from a `random.Random`, which hypothesis can stand in for, so that the same generator serves a
property test, a table of switches and a long soak.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from random import Random
from typing import Any

from minisgl.config import EngineConfig

SWITCHES: dict[str, Sequence[Any]] = {
    "prefix_cache": ("none", "radix"),
    "eviction": ("lru", "lfu", "fifo"),
    "batching": ("static", "prefill_first", "mixed"),
    "chunked_prefill": (False, True),
    "policy": ("fcfs", "lpm"),
    "output_reserve": (0.0, 0.3, 1.0),
    "page_size": (1, 3, 16),
    "max_batch_tokens": (1, 5, 16, 64),
    "max_running_requests": (1, 3, 8),
    "graphs": ("off", "lazy"),
    "overlap": ("off", "on"),
    "longest_first": (False, True),
    "pdl": ("off", "auto"),
}


@dataclass
class Ask:
    """One request of a scenario."""

    at: int  # arrives before this step
    prompt: int  # which of the family's prompts
    max_tokens: int
    priority: int
    salt: str
    stop_after: int | None  # a token of the answer that is made a stop token; None for none


@dataclass
class Scenario:
    """A run to try. An abort is (step, request, whether the step is then in flight)."""

    switches: dict[str, Any]
    pages: int  # usable ones
    max_model_len: int
    depth: int  # steps planned before the first is retired
    asks: list[Ask]
    aborts: list[tuple[int, int, bool]] = field(default_factory=list)

    @property
    def config(self) -> EngineConfig:
        return EngineConfig(**self.switches, kv_pages=self.pages + 1, max_model_len=self.max_model_len)


def scenario(r: Random, prompts: int, answer: int, depths: Sequence[int] = (1,), **fixed: Any) -> Scenario:
    """Draw one.

    Args:
        prompts: size of the family of prompts.
        answer: longest answer.
        depths: what depth is drawn from.
        fixed: switches that are not drawn.
    """
    switches = {name: r.choice(values) for name, values in SWITCHES.items()}
    switches["graphs"] = r.choice(("off",) * 7 + ("lazy",))  # the stand-in takes several times as long
    switches |= fixed
    room = r.choice((10, 25, 40, 60, 200))  # tokens that the pool holds, about
    asks = list[Ask]()
    for _ in range(r.randint(1, 6)):
        ask = Ask(
            at=r.choice((0, 0, 0, 1, 2, 5, 9)),
            prompt=r.randrange(prompts),
            max_tokens=r.randint(1, answer),
            priority=r.choice((0, 0, 0, 1, -1)),
            salt=r.choice(("", "", "", "other")),
            stop_after=r.choice((None, None, r.randrange(answer))),
        )
        asks += [ask] * r.choice((1, 1, 1, 2, 3))  # n answers to one prompt are equal requests
    aborts = [
        (r.randint(0, 12), r.randrange(len(asks)), r.choice((False, True))) for _ in range(r.choice((0, 0, 1, 3)))
    ]
    return Scenario(
        switches,
        pages=max(1, -(-room // switches["page_size"])),
        max_model_len=r.choice((0, 0, 20)),
        depth=r.choice(depths),
        asks=asks,
        aborts=aborts,
    )


def pairwise(r: Random) -> list[dict[str, Any]]:
    """Few rows of switches in which every two values of two switches meet (a greedy covering array)."""
    pairs = {((a, x), (b, y)) for a, b in combinations(SWITCHES, 2) for x, y in product(SWITCHES[a], SWITCHES[b])}
    rows = list[dict[str, Any]]()
    while pairs:
        tries = [{name: r.choice(values) for name, values in SWITCHES.items()} for _ in range(30)]
        best = max(tries, key=lambda row: len(pairs & set(combinations(row.items(), 2))))
        covered = pairs & set(combinations(best.items(), 2))
        if covered:
            rows.append(best)
            pairs -= covered
    return rows


def expected(
    prompt: Sequence[int], answer: Sequence[int], max_tokens: int, stop_ids: Sequence[int], max_len: int
) -> list[int] | None:
    """The tokens that a request must get, of the endless answer's beginning; None where it must be refused."""
    if len(prompt) >= max_len:
        return None
    cut = list(answer[: min(max_tokens, max_len - len(prompt))])
    for i, token in enumerate(cut):
        if token in stop_ids:
            return cut[: i + 1]
    return cut


def scenarios(default: int) -> int:
    """How many a property test tries: MINISGL_SCENARIOS, or the default, whose scenarios are always the same."""
    return int(os.environ.get("MINISGL_SCENARIOS", default))


FRESH = "MINISGL_SCENARIOS" in os.environ  # then each run tries others
