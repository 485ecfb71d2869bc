"""What the engine's plain Python costs a step and a request: no model runs, the tokens are made up.

Two questions:
- decode: how long a step of 256 running requests takes in `plan` and `retire`, and until its inputs stand in the rows
  (`fill`: `DeviceRows.update` and `decode`, on a CPU).
- soak: what a request costs from its arrival to its end, by tenths of a long run, so that growth would show.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from random import Random
from statistics import median, quantiles
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.record import save
from minisgl.config import EngineConfig
from minisgl.core import Batch, Request, SamplingParams
from minisgl.engine.rows import DeviceRows, StepInputs
from minisgl.kvcache.cache_manager import CacheManager
from minisgl.kvcache.pages import PageAllocator
from minisgl.kvcache.radix_cache import PREFIX_CACHES
from minisgl.scheduler.scheduler import Scheduler

PAGE_SIZE = 16


def new_scheduler(pages: int, max_len: int, **switches: Any) -> Scheduler:
    """A scheduler over an empty pool of this many usable pages."""
    config = EngineConfig(**switches)
    allocator = PageAllocator(pages + 1)  # and the dummy
    prefix = PREFIX_CACHES[config.prefix_cache](allocator, config.page_size, config.eviction)
    return Scheduler(config, CacheManager(allocator, config.page_size, prefix), max_len)


def made_up_tokens(batch: Batch) -> list[int]:
    """A token below 50 for each request, which depends on its position, so that answers differ."""
    ends = zip(batch.requests, batch.starts, batch.num_tokens, strict=True)
    return [(request.id * 31 + (start + n) * 7) % 50 for request, start, n in ends]


def decode(requests: int, prompt: int, steps: int) -> dict[str, Any]:
    """Steps in which each of many requests computes one token; microseconds by part."""
    max_len = prompt + requests + steps + 10
    pages = requests * -(-max_len // PAGE_SIZE)
    scheduler = new_scheduler(pages, max_len, max_batch_tokens=10**6, max_running_requests=requests)
    rows = DeviceRows(requests, max_len, PAGE_SIZE, torch.device("cpu"))
    params = SamplingParams(max_tokens=steps + 5, ignore_eos=True)
    for i in range(requests):  # of different lengths, so that their pages fill up at different times
        scheduler.add(Request(i, [(i * 7 + j) % 50 for j in range(prompt + i)], params))
    times: dict[str, list[float]] = {"plan": [], "fill": [], "retire": []}
    for step in range(steps):
        marks = [time.perf_counter()]
        batch = scheduler.plan()
        marks.append(time.perf_counter())
        assert batch is not None
        inputs = fill(rows, batch)
        marks.append(time.perf_counter())
        tokens = made_up_tokens(batch)
        rows.keep(inputs, torch.tensor(tokens))
        between = time.perf_counter()
        scheduler.retire(batch, tokens)
        marks.append(time.perf_counter() - (between - marks[2]))
        if step:  # the first is the prefill
            for name, start, end in zip(times, marks, marks[1:], strict=False):
                times[name].append(1e6 * (end - start))
    together = [plan + retire for plan, retire in zip(times["plan"], times["retire"], strict=True)]
    return {"requests": requests, "prompt_tokens": prompt, "steps": steps - 1} | {
        f"{name}_us": spread(values) for name, values in {**times, "plan_and_retire": together}.items()
    }


@torch.inference_mode()
def fill(rows: DeviceRows, batch: Batch) -> StepInputs:
    """Bring the rows up to date and read a step's inputs there."""
    n, total = len(batch.requests), batch.total_tokens
    rows.update(batch, n)
    return rows.decode(n) if total == n else rows.lay_out(batch, total, n)


def spread(values: list[float]) -> dict[str, float]:
    """The median, and between what values nine tenths of all lie."""
    *_, high = cuts = quantiles(values, n=20)
    return {"median": round(median(values), 2), "p5": round(cuts[0], 2), "p95": round(high, 2)}


@dataclass
class Traffic:
    """Requests that share system prompts, come in bursts and sometimes leave before they are served."""

    random: Random
    next_id: int = 0
    systems: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.systems = [[self.random.randrange(50) for _ in range(self.random.randint(5, 60))] for _ in range(12)]

    def request(self) -> Request:
        """The next one."""
        random = self.random
        system = random.choice(self.systems)[: random.choice((7, 16, 32, 60))]
        tokens = system + [random.randrange(50) for _ in range(random.randint(1, 20))]
        params = SamplingParams(max_tokens=random.randint(1, 24), priority=random.choice((0, 0, 0, 1)))
        made = Request(self.next_id, tokens, params, stop_ids=frozenset({3}))
        self.next_id += 1
        return made

    def serve(self, scheduler: Scheduler, requests: int) -> None:
        """Let this many requests come, be served and go."""
        random, end = self.random, self.next_id + requests
        while self.next_id < end or scheduler.has_work:
            while self.next_id < end and len(scheduler.waiting) < 20:
                scheduler.add(self.request())
            if random.random() < 0.02:
                scheduler.abort(self.next_id - random.randint(1, 30))
            if batch := scheduler.plan():
                if random.random() < 0.02:
                    scheduler.abort(random.choice(batch.requests).id)
                scheduler.retire(batch, made_up_tokens(batch))
            scheduler.finished.clear()  # as the engine does


def soak(requests: int, parts: int = 10) -> dict[str, Any]:
    """Microseconds a request, by tenths; a small pool, so that preemption and eviction have their share."""
    scheduler = new_scheduler(120, 481, page_size=4, max_running_requests=16, max_batch_tokens=64, output_reserve=0.1)
    traffic, per_request = Traffic(Random(0)), list[float]()
    for _ in tqdm(range(parts), unit="tenth"):
        start = time.perf_counter()
        traffic.serve(scheduler, requests // parts)
        per_request.append(round(1e6 * (time.perf_counter() - start) / (requests // parts), 2))
    held = scheduler.cache.pages.capacity - scheduler.cache.pages.num_free
    return {
        "requests": requests,
        "us_per_request": per_request,
        "preemptions": scheduler.work.preemptions,
        "tokens_reused": scheduler.work.tokens_reused,
        "pages_leaked": held - scheduler.cache.prefix.num_pages,
    }


def main() -> None:
    """Measure and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256, help="requests side by side (default: 256)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the shortest prompt (default: 512)")
    parser.add_argument("--steps", type=int, default=500, help="decode steps (default: 500)")
    parser.add_argument("--requests", type=int, default=100_000, help="of the soak (default: 100000)")
    args = parser.parse_args()

    data = {"decode": decode(args.running, args.prompt, args.steps), "soak": soak(args.requests)}
    for name in ("plan", "retire", "plan_and_retire", "fill"):
        cost = data["decode"][f"{name}_us"]
        print(f"{name:16} {cost['median']:8.1f} µs ({cost['p5']:.1f} … {cost['p95']:.1f})")
    print("a request, by tenths of the soak:", *(f"{cost:.0f}" for cost in data["soak"]["us_per_request"]), "µs")
    print(save("scheduler_host", data))


if __name__ == "__main__":
    main()
