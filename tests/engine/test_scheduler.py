"""The scheduler with a fake model: who runs, in what order, how much of it, and who gives way."""

from __future__ import annotations

from random import Random

import pytest

from tests.engine.scenarios import scenario
from tests.engine.test_scheduler_properties import LONGEST, PROMPTS, run
from tests.helpers import check_pool, check_whole, fake_forward, request, run_to_the_end, scheduler_with


def ids(batch):
    return [(r.id, n) for r, n in zip(batch.requests, batch.num_tokens, strict=True)]


def step(scheduler):
    batch = scheduler.plan()
    scheduler.retire(batch, fake_forward(batch))
    return ids(batch)


def alone_in(pages, r):
    """The tokens of a request that has all these pages to itself, one step after the other."""
    scheduler = scheduler_with(pages=pages)
    scheduler.add(other := request(0, r.tokens[: r.prompt_len], max_tokens=r.params.max_tokens))
    run_to_the_end(scheduler)
    return other.tokens


def add(scheduler, *requests):
    for r in requests:
        scheduler.add(r)
    return requests


# Composition


def test_a_mixed_step_serves_decodes_first_and_fills_up_with_a_chunk():
    scheduler = scheduler_with(pages=100, max_batch_tokens=8)
    add(scheduler, request(0, [1] * 3), request(1, [2] * 20))

    assert step(scheduler) == [(0, 3), (1, 5)]
    assert step(scheduler) == [(0, 1), (1, 7)]
    assert step(scheduler) == [(0, 1), (1, 7)]
    assert step(scheduler) == [(0, 1), (1, 1)]  # its last prompt token
    assert step(scheduler) == [(0, 1), (1, 1)]


def test_prefill_first_lets_decodes_wait_until_every_prompt_is_through():
    scheduler = scheduler_with(pages=100, max_batch_tokens=8, batching="prefill_first")
    add(scheduler, request(0, [1] * 3), request(1, [2] * 9))

    assert step(scheduler) == [(0, 3), (1, 5)]
    assert step(scheduler) == [(1, 4)]
    assert step(scheduler) == [(0, 1), (1, 1)]


def test_a_static_group_runs_to_its_end_before_the_next_one_starts():
    scheduler = scheduler_with(pages=100, batching="static", max_running_requests=2)
    add(scheduler, request(0, [1], max_tokens=1), request(1, [2], max_tokens=3), request(2, [3], max_tokens=1))

    assert [step(scheduler) for _ in range(4)] == [[(0, 1), (1, 1)], [(1, 1)], [(1, 1)], [(2, 1)]]


def test_a_static_group_knows_no_budget():
    scheduler = scheduler_with(pages=100, batching="static", max_batch_tokens=2)
    add(scheduler, *(request(i, [i] * 5) for i in range(4)))

    assert step(scheduler) == [(i, 5) for i in range(4)]
    assert step(scheduler) == [(i, 1) for i in range(4)]


@pytest.mark.parametrize("prompt", [7, 8, 9, 16, 17])
def test_chunks_cover_the_prompt_and_only_the_last_one_gives_a_token(prompt):
    scheduler = scheduler_with(pages=100, max_batch_tokens=8)
    [r] = add(scheduler, request(0, range(prompt)))
    chunks = -(-prompt // 8)

    for chunk in range(chunks):
        assert r.output == []
        assert step(scheduler) == [(0, min(8, prompt - 8 * chunk))]
    assert len(r.output) == 1


def test_without_chunks_a_prompt_beyond_the_budget_waits_until_it_can_run_alone():
    scheduler = scheduler_with(pages=100, max_batch_tokens=8, chunked_prefill=False)
    add(scheduler, request(0, [1] * 3, max_tokens=2), request(1, [2] * 20, max_tokens=1))

    assert [step(scheduler) for _ in range(3)] == [[(0, 3)], [(0, 1)], [(1, 20)]]


# Order


def test_first_come_first_served():
    scheduler = scheduler_with(pages=100, max_running_requests=1)
    add(scheduler, *(request(i, [1], max_tokens=1) for i in range(3)))

    assert [step(scheduler) for _ in range(3)] == [[(0, 1)], [(1, 1)], [(2, 1)]]


def test_a_higher_priority_is_served_first_whenever_it_came():
    scheduler = scheduler_with(pages=100, max_running_requests=1)
    add(scheduler, *(request(i, [1], max_tokens=1, priority=i % 2) for i in range(4)))

    assert [step(scheduler)[0][0] for _ in range(4)] == [1, 3, 0, 2]


def test_nobody_overtakes_a_request_that_does_not_fit():
    scheduler = scheduler_with(pages=10, page_size=1, output_reserve=1.0)
    first, big, small = add(
        scheduler,
        request(0, [1] * 5, max_tokens=3),
        request(1, [2] * 8, max_tokens=1),
        request(2, [3], max_tokens=1),
    )

    assert step(scheduler) == [(0, 5)]
    assert scheduler.waiting == [big, small]
    run_to_the_end(scheduler)
    assert (first.finish_reason, big.finish_reason, small.finish_reason) == ("length",) * 3


def test_lpm_takes_the_longest_cached_prefix_first():
    scheduler = scheduler_with(pages=100, page_size=2, policy="lpm", max_running_requests=1)
    add(scheduler, request(0, [7] * 9, max_tokens=1))
    step(scheduler)
    add(
        scheduler,
        request(1, [5] * 9, max_tokens=1),
        request(2, [7, 7, 7, 8], max_tokens=1),
        request(3, [7] * 8, max_tokens=1),
    )

    assert [step(scheduler) for _ in range(3)] == [[(3, 2)], [(2, 2)], [(1, 9)]]


# Pages


def test_a_finished_requests_pages_serve_the_next_step():
    scheduler = scheduler_with(pages=5, page_size=1)
    add(scheduler, request(0, [1] * 4, max_tokens=1), request(1, [2] * 4, max_tokens=1))

    assert [step(scheduler), step(scheduler)] == [[(0, 4)], [(1, 4)]]


def test_the_last_to_come_gives_way_and_resumes_with_its_answer():
    scheduler = scheduler_with(pages=8, page_size=1, output_reserve=0.0, prefix_cache="none")
    first, second = add(scheduler, request(0, [1] * 3, max_tokens=5), request(1, [2] * 3, max_tokens=5))

    run_to_the_end(scheduler)
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert second.tokens == alone_in(100, second)
    check_whole(scheduler)


def test_the_lower_priority_gives_way_to_the_higher():
    scheduler = scheduler_with(pages=8, page_size=1, output_reserve=0.0, prefix_cache="none")
    low, high = add(scheduler, request(0, [1] * 3, max_tokens=5), request(1, [2] * 3, max_tokens=5, priority=1))

    run_to_the_end(scheduler)
    assert (low.preemptions > 0, high.preemptions) == (True, 0)


def test_a_full_reserve_never_preempts():
    for seed in range(200):
        case = scenario(Random(seed), len(PROMPTS), LONGEST, output_reserve=1.0)
        requests, _ = run(case)
        assert sum(r.preemptions for r in requests) == 0, case


def test_cached_tokens_are_those_found_when_a_request_first_starts():
    scheduler = scheduler_with(pages=12, page_size=1, output_reserve=0.0)
    add(scheduler, request(0, [1, 2, 3, 4], max_tokens=8), late := request(1, [5, 6, 7, 8], max_tokens=8))

    run_to_the_end(scheduler)
    assert late.preemptions > 0  # and then it found its own tokens in the cache
    assert late.num_cached == 0
    assert scheduler.work.tokens_reused > 0


# Steps in flight


def test_an_aborted_request_keeps_its_pages_until_its_step_is_retired():
    scheduler = scheduler_with(pages=4, page_size=1)
    [r] = add(scheduler, request(0, [1, 2, 3]))
    batch = scheduler.plan()

    scheduler.abort(0)
    assert len(r.pages) == 3
    check_pool(scheduler, [r])
    assert scheduler.retire(batch, [9]) == []
    assert (r.output, r.pages) == ([], [])
    check_whole(scheduler)


def test_steps_of_one_prompt_may_be_planned_ahead():
    scheduler = scheduler_with(pages=100, max_batch_tokens=4)
    [r] = add(scheduler, request(0, range(10), max_tokens=1))
    flying = [scheduler.plan() for _ in range(4)]

    assert [ids(batch) for batch in flying[:3]] == [[(0, 4)], [(0, 4)], [(0, 2)]]
    assert flying[3] is None  # its only token is on the way
    for batch in flying[:3]:
        scheduler.retire(batch, fake_forward(batch))
    assert (len(r.output), r.finish_reason) == (1, "length")


def test_a_token_that_a_step_in_flight_will_bring_may_be_computed_by_the_next():
    scheduler = scheduler_with(pages=100, overlap="on")
    [r] = add(scheduler, request(0, [1, 2, 3], max_tokens=3))
    flying = [scheduler.plan() for _ in range(4)]

    assert [ids(batch) for batch in flying[:3]] == [[(0, 3)], [(0, 1)], [(0, 1)]]
    assert [batch.starts for batch in flying[:3]] == [[0], [3], [4]]
    assert flying[3] is None  # the answer's last token is never fed back
    for batch in flying[:3]:
        scheduler.retire(batch, fake_forward(batch))
    assert r.tokens == alone_in(100, r)


def test_tokens_of_steps_planned_before_an_end_was_known_are_dropped():
    scheduler = scheduler_with(pages=100, overlap="on", page_size=1)
    [r] = add(scheduler, request(0, [1, 2, 3], stop_ids=[9]))
    flying = [scheduler.plan() for _ in range(3)]

    assert scheduler.retire(flying[0], [9]) == [r]
    assert (r.output, r.finish_reason) == ([9], "stop")
    for batch, pages in zip(flying[1:], (5, 0), strict=True):
        check_pool(scheduler, [r])
        assert scheduler.retire(batch, [4]) == []
        assert len(r.pages) == pages  # what a planned step writes to is nobody else's
    assert r.output == [9]
    check_whole(scheduler)


def test_a_request_in_flight_is_not_preempted():
    scheduler = scheduler_with(
        pages=4, overlap="on", page_size=1, output_reserve=0.0, max_batch_tokens=2, prefix_cache="none"
    )
    requests = add(scheduler, request(0, [1], max_tokens=3), request(1, [2] * 3, max_tokens=2))
    one, two = scheduler.plan(), scheduler.plan()
    assert [ids(one), ids(two)] == [[(0, 1), (1, 1)]] * 2

    assert scheduler.plan() is None  # both need a page, and each has a step that still uses its own
    scheduler.retire(one, fake_forward(one))
    assert scheduler.plan() is None
    check_pool(scheduler, requests)
    scheduler.retire(two, fake_forward(two))
    run_to_the_end(scheduler)
    assert [(len(r.output), r.preemptions) for r in requests] == [(3, 0), (2, 1)]


def test_moved_page_tables_are_told_even_if_the_next_plan_is_empty():
    scheduler = scheduler_with(pages=9, overlap="on", page_size=1, max_batch_tokens=3, output_reserve=0.0)
    add(scheduler, request(0, [1, 2, 3, 4]), twin := request(1, [1, 2, 9, 9]))
    one, two, three = (scheduler.plan() for _ in range(3))
    assert [ids(batch) for batch in (one, two, three)] == [[(0, 3)], [(0, 1), (1, 2)], [(0, 1), (1, 2)]]

    scheduler.retire(one, fake_forward(one))
    scheduler.retire(two, fake_forward(two))  # the twin moves over to two pages of the first
    assert scheduler.plan() is None  # no page is free: the third step still reads those that the twin left
    scheduler.retire(three, fake_forward(three))
    assert (twin, 0) in scheduler.plan().moved


def test_a_step_that_failed_is_planned_again():
    scheduler = scheduler_with(pages=20, page_size=2, max_batch_tokens=8)
    requests = add(scheduler, request(0, [1] * 5, max_tokens=2), request(1, [2] * 9, max_tokens=2))
    step(scheduler)
    failed = scheduler.plan()
    told = list(failed.moved)
    scheduler.abort(1)
    scheduler.undo(failed)

    assert requests[1].pages == []
    again = scheduler.plan()
    assert ids(again) == [(0, 1)]
    assert told
    assert again.moved[: len(told)] == told  # nobody may have heard of it
    scheduler.retire(again, fake_forward(again))
    run_to_the_end(scheduler)
    check_whole(scheduler)


def test_page_tables_that_moved_before_a_step_failed_are_told_with_the_next():
    scheduler = scheduler_with(pages=20, page_size=2, overlap="on")
    add(scheduler, request(0, [1] * 5), twin := request(1, [1] * 5))
    one, two = scheduler.plan(), scheduler.plan()
    scheduler.retire(one, fake_forward(one))  # the twin moves over to the first's pages
    scheduler.undo(two)

    assert (twin, 0) in scheduler.plan().moved


# Ends


@pytest.mark.parametrize(("max_tokens", "context", "output"), [(5, 0, 5), (50, 12, 9), (9, 12, 9)])
def test_an_answer_ends_with_max_tokens_or_the_context(max_tokens, context, output):
    scheduler = scheduler_with(pages=100, max_model_len=context)
    [r] = add(scheduler, request(0, [1, 2, 3], max_tokens=max_tokens))
    run_to_the_end(scheduler)

    assert (len(r.output), r.finish_reason) == (output, "length")


def test_a_pool_without_room_for_the_context_shortens_answers():
    scheduler = scheduler_with(pages=4, page_size=2)
    [r] = add(scheduler, request(0, [1, 2, 3], max_tokens=50))
    run_to_the_end(scheduler)

    assert len(r.tokens) == 4 * 2 + 1  # the last token is never fed back


def test_a_refused_request_is_finished_at_once_with_the_reason():
    scheduler = scheduler_with(pages=2, page_size=2)
    refused, too_long = add(scheduler, request(1, [1] * 5)), request(0, [1])
    scheduler.add(too_long, "no")

    assert [r.finish_reason for r in scheduler.finished] == ["error", "error"]
    assert refused[0].error.startswith("the prompt has 5 tokens, but a sequence may have at most 5 here")
    assert too_long.error == "no"
    assert not scheduler.has_work


def test_an_abort_of_a_finished_or_unknown_request_is_ignored():
    scheduler = scheduler_with(pages=10)
    [r] = add(scheduler, request(0, [1], max_tokens=1))
    run_to_the_end(scheduler)
    scheduler.abort(0)
    scheduler.abort(99)

    assert r.finish_reason == "length"
    assert scheduler.finished == [r]
