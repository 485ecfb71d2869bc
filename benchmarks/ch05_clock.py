"""A clock that runs by rule: the real scheduler, and a step that takes a stated time. The same numbers everywhere.

Nothing here imports torch. What a step computes is what the engine would compute; only the tokens are made up, and each
answer has the length that its job states.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean
from time import perf_counter

from minisgl.config import EngineConfig
from minisgl.core import Batch, Request, SamplingParams
from minisgl.engine.trace import Trace
from minisgl.kvcache.cache_manager import CacheManager
from minisgl.kvcache.pages import PageAllocator
from minisgl.kvcache.radix_cache import PREFIX_CACHES
from minisgl.scheduler.scheduler import Scheduler

MODES = {
    "static": {"batching": "static"},
    "continuous": {"batching": "prefill_first", "chunked_prefill": False},
    "chunked": {"batching": "prefill_first"},
    "mixed": {"batching": "mixed"},
}


@dataclass(frozen=True)
class Cost:
    """What a step takes: a fixed part (weights are read, Python runs), and a part for each token row."""

    step_ms: float = 10.0
    token_ms: float = 0.1

    def of(self, num_tokens: int) -> float:
        return self.step_ms + self.token_ms * num_tokens


@dataclass(frozen=True)
class Job:
    """A request as its user sees it: when it comes, how many tokens it brings, gets, and allows (0: as it gets)."""

    arrival_ms: float
    prompt: int
    output: int
    max_tokens: int = 0


@dataclass
class Run:
    """What became of some jobs. Times are milliseconds on the clock."""

    jobs: Sequence[Job]
    steps: list[tuple[float, float, list[tuple[int, int, int]]]] = field(default_factory=list)  # start, end, rows
    token_ms: dict[int, list[float]] = field(default_factory=dict)  # of each job: when each token came
    preemptions: int = 0
    tokens_computed: int = 0

    @property
    def makespan_ms(self) -> float:
        """From the first arrival to the last token."""
        return max(times[-1] for times in self.token_ms.values()) - min(job.arrival_ms for job in self.jobs)

    @property
    def tokens_per_s(self) -> float:
        return 1000 * sum(job.output for job in self.jobs) / self.makespan_ms

    @property
    def first_token_ms(self) -> list[float]:
        """From arrival to first token, by job."""
        return [self.token_ms[i][0] - job.arrival_ms for i, job in enumerate(self.jobs)]

    @property
    def gaps_ms(self) -> list[float]:
        """The times between neighbouring tokens of an answer, all jobs together."""
        return [b - a for times in self.token_ms.values() for a, b in pairwise(times)]

    @property
    def summary(self) -> dict[str, float]:
        gaps = self.gaps_ms
        return {
            "steps": len(self.steps),
            "tokens_computed": self.tokens_computed,
            "preemptions": self.preemptions,
            "makespan_ms": self.makespan_ms,
            "tokens_per_s": self.tokens_per_s,
            "worst_gap_ms": max(gaps),
            "mean_gap_ms": mean(gaps),
            "mean_first_token_ms": mean(self.first_token_ms),
            "worst_first_token_ms": max(self.first_token_ms),
        }


END = 0  # the token that ends an answer; any other is MORE
MORE = 1


def make_request(i: int, job: Job) -> Request:
    """A prompt that shares nothing with others."""
    return Request(i, [i + 2] * job.prompt, SamplingParams(max_tokens=job.max_tokens or job.output), frozenset({END}))


def simulate(
    jobs: Sequence[Job], config: EngineConfig, cost: Cost | None = None, pages: int = 0, trace: str = ""
) -> Run:
    """Run jobs (in order of arrival) through the scheduler.

    Args:
        config: the switches.
        pages: in the pool; 0 is as many as all jobs need together.
        trace: a file to write the engine's trace to, with this clock's times.
    """
    cost, size = cost or Cost(), config.page_size
    needed = sum(-(-(job.prompt + job.output) // size) for job in jobs)
    allocator = PageAllocator((pages or needed) + 1)
    cache = CacheManager(allocator, size, PREFIX_CACHES[config.prefix_cache](allocator, size, config.eviction))
    scheduler = Scheduler(config, cache, allocator.capacity * size + 1)
    writer = Trace(trace, scheduler) if trace else None
    run, now, coming = Run(jobs), 0.0, list(enumerate(jobs))[::-1]
    while coming or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, coming[-1][1].arrival_ms)
        while coming and coming[-1][1].arrival_ms <= now:
            scheduler.add(make_request(*coming.pop()))
        batch = scheduler.plan()
        assert batch is not None, "somebody is there, and nobody can run"
        end = now + cost.of(batch.total_tokens)
        tokens = [END if len(r.output) + 1 == jobs[r.id].output else MORE for r in batch.requests]
        for request in scheduler.retire(batch, tokens):
            run.token_ms.setdefault(request.id, []).append(end)
        run.steps.append((now, end, rows(batch)))
        run.tokens_computed += batch.total_tokens
        ended, scheduler.finished = scheduler.finished, []
        now = end
        if writer:
            writer.start = perf_counter() - now / 1000
            writer.write(batch, ended)
    if writer:
        writer.close()
    run.preemptions = scheduler.work.preemptions
    return run


def rows(batch: Batch) -> list[tuple[int, int, int]]:
    """Request, first position and number of tokens of each row."""
    return [(r.id, start, n) for r, start, n in zip(batch.requests, batch.starts, batch.num_tokens, strict=True)]


def switches(mode: str, **overrides: object) -> EngineConfig:
    """The engine of this chapter in one of its four modes, without a prefix cache: nothing here is shared."""
    return EngineConfig.chapter(5, prefix_cache="none", **MODES[mode], **overrides)


def by_hand() -> list[Job]:
    """Four requests that can be followed with a pencil."""
    return [Job(0, 50, 8), Job(0, 100, 3), Job(20, 300, 4), Job(40, 50, 4)]


def mixture(count: int, seed: int, per_s: float = 0.0) -> list[Job]:
    """Prompts of 32 … 512 tokens and answers of 16 … 128, at random moments `per_s` times a second, or all at once.

    Each allows 128 tokens, since nobody knows before how long an answer will be.
    """
    rng = random.Random(seed)
    now, jobs = 0.0, []
    for _ in range(count):
        now += 1000 * rng.expovariate(per_s) if per_s else 0.0
        jobs.append(Job(now, rng.randint(32, 512), rng.randint(16, 128), 128))
    return jobs


def most_per_s(mode: str, cost: Cost, budget: int, rows: int, prompt: float, output: float) -> float:
    """The arrival rate at which a queue must grow without end: one request then takes as long as it takes to come.

    A mixed step that is always full computes `budget` tokens, whoever they belong to. With prefill first, a prompt has
    its share of full prefill steps, and each further token its share of a decode step of `rows` rows.
    """
    if mode == "mixed":
        return 1000 * budget / (cost.of(budget) * (prompt + output - 1))
    return 1000 / (cost.of(budget) * prompt / budget + cost.of(rows) * (output - 1) / rows)
