"""Whole runs with a fake model: whatever the switches, the pool and the arrivals are, each request gets its own tokens.
Needs all tasks."""

from __future__ import annotations

import itertools
import random

import pytest

from minisgl.core import Request
from tests.ch05_continuous_batching.harness import alone, drive, new_request, new_scheduler

BATCHING = ["static", "prefill_first", "mixed"]


def workload(seed: int, count: int = 12) -> list[tuple[int, Request]]:
    """Requests that share beginnings, and the steps before which they come."""
    rng = random.Random(seed)
    beginning = [rng.randrange(10, 50) for _ in range(20)]
    steps = sorted(rng.randrange(40) for _ in range(count))
    arrivals = []
    for id, step in enumerate(steps):
        prompt = beginning[: rng.randrange(20)] + [rng.randrange(10, 50) for _ in range(rng.randrange(1, 12))]
        arrivals.append(
            (step, new_request(id, prompt, max_tokens=rng.randrange(1, 20), priority=rng.choice([0, 0, 1])))
        )
    return arrivals


@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize(("pages", "page_size"), [(14, 4), (40, 1), (5, 16), (200, 3)])
@pytest.mark.parametrize("seed", range(4))
def test_every_request_gets_the_tokens_it_would_get_alone(batching, pages, page_size, seed):
    rng = random.Random(seed)
    scheduler = new_scheduler(
        pages,
        batching=batching,
        page_size=page_size,
        chunked_prefill=rng.random() < 0.7,
        max_batch_tokens=rng.choice([1, 5, 16, 100]),
        max_running_requests=rng.choice([2, 4, 16]),
        output_reserve=rng.choice([0.0, 0.3, 1.0]),
        prefix_cache=rng.choice(["none", "radix"]),
        policy=rng.choice(["fcfs", "lpm"]),
    )
    arrivals = workload(seed)
    expected = {request.id: alone(request, scheduler.max_len) for _, request in arrivals}

    drive(scheduler, arrivals)

    for _, request in arrivals:
        assert request.finish_reason in ("stop", "length")
        assert request.tokens == expected[request.id], f"request {request.id} ended with other tokens than alone"
    scheduler.cache.prefix.evict(10**6)
    assert scheduler.cache.pages.num_free == pages, "at the end the pool is whole"
    assert sorted(scheduler._free_rows) == list(range(scheduler.config.max_running_requests))


@pytest.mark.parametrize("reserve", [0.0, 1.0])
def test_setting_everything_aside_never_preempts_and_setting_nothing_aside_does(reserve):
    scheduler = new_scheduler(pages=12, output_reserve=reserve)
    requests = [new_request(i, prompt=6, max_tokens=20, ignore_eos=True) for i in range(6)]
    for request in requests:
        request.stop_ids = frozenset()
    steps = drive(scheduler, [(0, request) for request in requests])

    assert all(len(request.output) == 20 for request in requests)
    if reserve:
        assert scheduler.work.preemptions == 0
        assert max(len(rows) for rows in steps) == 1, "of 12 pages, 7 are set aside for each: one runs at a time"
    else:
        assert scheduler.work.preemptions > 0
        assert max(len(rows) for rows in steps) > 3


@pytest.mark.parametrize("budget", [1, 2, 7, 64])
@pytest.mark.parametrize("batching", ["prefill_first", "mixed"])
def test_with_chunks_no_step_exceeds_the_budget_and_none_wastes_it(batching, budget):
    scheduler = new_scheduler(batching=batching, max_batch_tokens=budget)
    steps = drive(scheduler, workload(7))
    assert all(sum(n for _, _, n in rows) <= budget for rows in steps)


@pytest.mark.parametrize("batching", BATCHING)
def test_the_same_arrivals_make_the_same_steps(batching):
    runs = [drive(new_scheduler(14, batching=batching), workload(3)) for _ in range(2)]
    assert runs[0] == runs[1]


def test_first_come_first_served_means_the_first_token_too():
    scheduler = new_scheduler(max_batch_tokens=8, max_running_requests=4)
    arrivals = [(0, new_request(i, prompt=5 + 7 * (i % 3), max_tokens=5)) for i in range(12)]
    first_seen = {}
    for step, rows in enumerate(drive(scheduler, arrivals)):
        for id, _, _ in rows:
            first_seen.setdefault(id, step)
    assert list(first_seen) == list(range(12))
    assert all(a <= b for a, b in itertools.pairwise(first_seen.values()))


@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize("seed", range(6))
def test_requests_may_be_aborted_in_flight_and_the_others_do_not_notice(batching, seed):
    rng = random.Random(seed)
    scheduler = new_scheduler(14, batching=batching, max_batch_tokens=9, prefix_cache="radix")
    arrivals = workload(seed)
    expected = {request.id: alone(request, scheduler.max_len) for _, request in arrivals}

    def abort_one(step, batch):
        if rng.random() < 0.15:
            scheduler.abort(rng.choice(batch.requests).id)

    drive(scheduler, arrivals, abort_one)

    assert any(request.finish_reason == "abort" for _, request in arrivals)
    for _, request in arrivals:
        if request.finish_reason == "abort":
            assert request.tokens == expected[request.id][: len(request.tokens)]
        else:
            assert request.tokens == expected[request.id]
