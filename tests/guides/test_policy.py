"""The guide's policies: what they change, and what they must not."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from chapters.reference.examples import add_policy
from minisgl.config import EngineConfig
from minisgl.core import SamplingParams
from minisgl.engine.engine import Engine
from minisgl.kvcache.radix_cache import POLICIES
from minisgl.scheduler.policy import ORDERS
from minisgl.simple import cached_generate
from tests.helpers import check_pool, check_whole, request, run_to_the_end, scheduler_with, serve, tiny_model


@pytest.fixture(autouse=True)
def registered():
    with patch.dict(POLICIES), patch.dict(ORDERS):
        add_policy.register()
        yield


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def run(model, **switches) -> Engine:
    """The guide's workload, one token each."""
    engine = Engine(model, EngineConfig(**add_policy.POOL, **switches))
    serve(engine, *(request(i, p, max_tokens=1) for i, p in enumerate(add_policy.workload())))
    return engine


def test_a_prefix_that_was_found_survives_a_flood_that_least_recently_used_does_not(model):
    reused = {name: run(model, eviction=name).work.tokens_reused for name in ("lru", "found_before")}

    assert reused == {"lru": 64, "found_before": 5 * 64}  # at the second chat only, and at each behind the first


def test_the_pool_is_whole_at_the_end(model):
    check_whole(run(model, eviction="found_before").scheduler)


def test_eviction_changes_no_token(model):
    engine = Engine(model, EngineConfig(eviction="found_before", **add_policy.POOL))
    prompts = add_policy.workload(rounds=1)
    requests = serve(engine, *(request(i, p, max_tokens=6) for i, p in enumerate(prompts)))

    params = SamplingParams(max_tokens=6, ignore_eos=True)
    assert [r.output for r in requests] == [list(cached_generate(model, p, params)) for p in prompts]


def test_the_shortest_prompt_goes_first_within_its_priority():
    scheduler = scheduler_with(pages=30, policy="shortest", max_running_requests=1)
    lengths = {0: 9, 1: 3, 2: 5, 3: 20}
    for i, length in lengths.items():
        scheduler.add(request(i, range(length), max_tokens=1, priority=int(i == 3)))

    steps = run_to_the_end(scheduler)

    assert [batch.requests[0].id for batch in steps] == [3, 1, 2, 0]
    check_whole(scheduler)


def test_preempted_requests_are_whole_under_the_new_order():
    scheduler = scheduler_with(pages=6, policy="shortest", page_size=4, output_reserve=0.0, max_batch_tokens=8)
    requests = [request(i, range(i, i + 3 + i), max_tokens=8) for i in range(4)]
    for r in requests:
        scheduler.add(r)

    while scheduler.has_work:
        batch = scheduler.plan()
        scheduler.retire(batch, [7] * len(batch.requests))
        check_pool(scheduler, requests)

    assert scheduler.work.preemptions > 0
    assert [len(r.output) for r in requests] == [8] * 4
    check_whole(scheduler)
