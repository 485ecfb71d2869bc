"""Many requests through the scheduler: nothing is left behind, and the last costs what the first did.

By default 3,000 requests; MINISGL_SOAK=100000 runs as many (some minutes).
"""

from __future__ import annotations

import gc
import os
import tracemalloc
from dataclasses import dataclass, field
from random import Random

import pytest

from benchmarks.scheduler_host import Traffic
from minisgl.scheduler.scheduler import Scheduler
from tests.helpers import check_pool, check_whole, scheduler_with

REQUESTS = int(os.environ.get("MINISGL_SOAK", 3000))
PARTS = 10


@dataclass
class Soak:
    """A scheduler after the soak, and how things stood after each part of it."""

    scheduler: Scheduler
    memory: list[int] = field(default_factory=list)  # bytes
    heap: list[int] = field(default_factory=list)  # entries
    cached: list[int] = field(default_factory=list)  # pages
    work: list[dict[str, int]] = field(default_factory=list)  # calls into the tree, in the part alone


def counted(method, calls: dict[str, int], kind: str):
    def call(*args):
        calls[kind] += 1
        return method(*args)

    return call


@pytest.fixture(scope="module")
def soak():
    calls = {"compared": 0, "offered": 0, "split": 0}
    scheduler = scheduler_with(pages=120, page_size=4, max_running_requests=16, max_batch_tokens=64, output_reserve=0.1)
    tree, traffic, done = scheduler.cache.prefix, Traffic(Random(0)), Soak(scheduler)
    for name, kind in (("_common_pages", "compared"), ("_offer", "offered"), ("_split", "split")):
        setattr(tree, name, counted(getattr(tree, name), calls, kind))
    tracemalloc.start()
    for _ in range(PARTS):
        before = dict(calls)
        traffic.serve(scheduler, REQUESTS // PARTS)
        check_pool(scheduler, [])
        gc.collect()
        done.memory.append(tracemalloc.get_traced_memory()[0])
        done.heap.append(len(tree._heap))
        done.cached.append(tree.num_pages)
        done.work.append({kind: calls[kind] - before[kind] for kind in calls})
    tracemalloc.stop()
    return done


@pytest.mark.slow
def test_no_page_and_no_request_is_left_behind(soak):
    assert soak.scheduler.work.preemptions > 0  # the pool was small enough
    assert soak.scheduler._requests == {}
    check_whole(soak.scheduler)


@pytest.mark.slow
def test_the_heap_stays_as_small_as_the_tree(soak):
    assert all(heap <= cached for heap, cached in zip(soak.heap, soak.cached, strict=True))  # a node has a page
    assert min(soak.cached) > 0


@pytest.mark.slow
def test_memory_does_not_grow(soak):
    half = PARTS // 2  # the tree's shape varies by some 10,000 bytes; one number kept a request would be as much
    assert max(soak.memory[half:]) - max(soak.memory[:half]) < 30_000


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["compared", "offered", "split"])
def test_the_last_requests_cost_what_the_first_did(soak, kind):
    costs = [work[kind] for work in soak.work[1:]]  # the first part fills an empty pool
    half = len(costs) // 2

    assert sum(costs[-half:]) < 1.15 * sum(costs[:half])
