"""Task 05.1: `Scheduler._continue` gives running requests their next tokens, in order, within the budget."""

from __future__ import annotations

import pytest

from minisgl.core import Batch
from tests.ch05_continuous_batching.harness import ids, new_request, new_scheduler, rows, run_it


def go_on(scheduler, budget, requests=None) -> Batch:
    """One call on a fresh batch; by default for all that run."""
    batch = Batch()
    scheduler._budget = budget
    scheduler._continue(batch, scheduler.running if requests is None else requests)
    return batch


def test_a_decode_computes_its_last_token():
    scheduler = new_scheduler()
    run_it(scheduler, new_request(0, prompt=6, answer=3), computed=8)
    assert rows(go_on(scheduler, budget=100)) == [(0, 8, 1)]


def test_a_prefill_computes_all_it_does_not_know_yet():
    scheduler = new_scheduler()
    run_it(scheduler, new_request(0, prompt=11), computed=4)
    assert rows(go_on(scheduler, budget=100)) == [(0, 4, 7)]


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (10, [(0, 10)]),
        (9, [(0, 9), (9, 1)]),
        (5, [(0, 5), (5, 5)]),
        (4, [(0, 4), (4, 4), (8, 2)]),
        (3, [(0, 3), (3, 3), (6, 3), (9, 1)]),
    ],
)
def test_a_prompt_of_10_is_cut_where_the_budget_ends_and_goes_on_there(budget, expected):
    scheduler = new_scheduler()
    request = run_it(scheduler, new_request(0, prompt=10), computed=0)

    for start, n in expected:
        batch = go_on(scheduler, budget)
        assert rows(batch) == [(0, start, n)], f"with a budget of {budget}, the chunk must be tokens {start} … {n} long"
        assert request.num_computed == start + n, "num_computed moves on when the step is planned"
    assert rows(go_on(scheduler, budget)) == [], "the next token is not known yet: there is nothing to compute"


def three(scheduler):
    """A decode, a prompt of 12 of which 3 are computed, and a decode: 1 + 9 + 1 tokens to compute."""
    run_it(scheduler, new_request(0, prompt=5, answer=1), computed=5)
    run_it(scheduler, new_request(1, prompt=12), computed=3)
    run_it(scheduler, new_request(2, prompt=7, answer=2), computed=8)
    return scheduler


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (100, [(0, 5, 1), (1, 3, 9), (2, 8, 1)]),
        (11, [(0, 5, 1), (1, 3, 9), (2, 8, 1)]),
        (10, [(0, 5, 1), (1, 3, 9)]),
        (6, [(0, 5, 1), (1, 3, 5)]),
        (2, [(0, 5, 1), (1, 3, 1)]),
        (1, [(0, 5, 1)]),
        (0, []),
    ],
)
def test_the_budget_is_shared_in_order_and_the_last_one_gets_the_rest(budget, expected):
    scheduler = three(new_scheduler())
    batch = go_on(scheduler, budget)
    assert rows(batch) == expected, f"budget {budget}: tokens 1 + 9 + 1 are wanted, in this order"
    assert batch.total_tokens <= budget
    assert scheduler._budget == budget - batch.total_tokens, "what is left of the budget is for new requests"


def test_who_gets_nothing_stays_as_it_was():
    scheduler = three(new_scheduler())
    go_on(scheduler, budget=4)
    last = scheduler.running[2]
    assert (last.num_computed, last.in_flight) == (8, 0)


def test_a_request_that_waits_for_its_token_in_flight_does_not_hold_up_those_behind_it():
    scheduler = three(new_scheduler())
    go_on(scheduler, budget=4)  # the first is decoded: its next token is unknown until this step is retired
    assert rows(go_on(scheduler, budget=100)) == [(1, 6, 6), (2, 8, 1)], "pass over the first, and go on with the loop"


def test_each_planned_step_of_a_request_counts_as_in_flight():
    scheduler = new_scheduler()
    request = run_it(scheduler, new_request(0, prompt=10), computed=0)
    for steps in (1, 2, 3):
        go_on(scheduler, budget=3)
        assert request.in_flight == steps


def test_the_batch_keeps_what_was_there_before():
    scheduler = three(new_scheduler())
    scheduler._budget, batch = 100, Batch()
    scheduler._continue(batch, scheduler.running[:1])
    scheduler._continue(batch, scheduler.running[1:])
    assert rows(batch) == [(0, 5, 1), (1, 3, 9), (2, 8, 1)]


def test_one_that_lost_its_pages_a_moment_ago_is_passed_over():
    scheduler = three(new_scheduler())
    line = list(scheduler.running)
    scheduler._let_go(line[1])  # as a preemption does: row -1
    assert rows(go_on(scheduler, budget=100, requests=line)) == [(0, 5, 1), (2, 8, 1)], "its row is -1: it has no pages"


def test_pages_are_asked_for_up_to_the_end_of_the_chunk_and_only_where_they_are_missing(monkeypatch):
    scheduler = new_scheduler()
    run_it(scheduler, new_request(0, prompt=4, answer=1), computed=4, tokens_of_pages=4)  # token 4 begins page 1
    run_it(scheduler, new_request(1, prompt=6, answer=1), computed=6, tokens_of_pages=8)  # token 6 has a page
    run_it(scheduler, new_request(2, prompt=20), computed=4, tokens_of_pages=8)  # tokens 4 … 7 have one
    asked = []
    monkeypatch.setattr(scheduler, "_grow", lambda batch, request, end: asked.append((request.id, end)) or True)

    batch = go_on(scheduler, budget=12)

    assert rows(batch) == [(0, 4, 1), (1, 6, 1), (2, 4, 10)]
    assert asked == [(0, 5), (2, 14)], "_grow takes the number of tokens that the pages must hold at the step's end"


def test_who_had_to_give_up_its_own_pages_is_not_in_the_step_and_spends_no_budget(monkeypatch):
    scheduler = new_scheduler()
    gave_up = run_it(scheduler, new_request(0, prompt=8), computed=0, tokens_of_pages=1)
    run_it(scheduler, new_request(1, prompt=8), computed=0)
    monkeypatch.setattr(scheduler, "_grow", lambda batch, request, end: False)

    batch = go_on(scheduler, budget=8, requests=list(scheduler.running))

    assert ids(batch.requests) == [1], "_grow said False for request 0; request 1 has its pages: nobody asks"
    assert batch.num_tokens == [8], "the whole budget is left for the second"
    assert (gave_up.num_computed, gave_up.in_flight) == (0, 0)
