"""Task 05.4: `Scheduler._preempt` takes a request's pages and lets it wait; nothing that it said is lost."""

from __future__ import annotations

from tests.ch05_continuous_batching.harness import check_pages, ids, new_request, new_scheduler, rows, run_it


def preempt(scheduler, request) -> None:
    scheduler.running.remove(request)  # _grow has taken it off the line
    scheduler._preempt(request)


def test_its_pages_and_its_row_are_free_again():
    scheduler = new_scheduler(pages=8, max_running_requests=1)
    victim = run_it(scheduler, new_request(0, prompt=9, answer=3), computed=11)

    preempt(scheduler, victim)

    assert (victim.pages, victim.row) == ([], -1)
    assert scheduler.cache.pages.num_free == 8
    assert scheduler._free_rows == [0]
    check_pages(scheduler, [victim])


def test_its_answer_stays():
    scheduler = new_scheduler()
    victim = run_it(scheduler, new_request(0, prompt=9, answer=3), computed=11)
    before = list(victim.tokens)

    preempt(scheduler, victim)

    assert victim.tokens == before, "the reader has seen these tokens already"
    assert victim.finish_reason is None
    assert scheduler.has_work


def test_it_waits_where_it_would_have_waited_by_its_arrival():
    scheduler = new_scheduler()
    victim = run_it(scheduler, new_request(5, prompt=4), computed=4)
    for id, priority in [(1, 0), (3, 1), (7, 0), (9, 0)]:
        scheduler.add(new_request(id, prompt=4, priority=priority))

    preempt(scheduler, victim)

    assert ids(scheduler.waiting) == [3, 1, 5, 7, 9], "by priority, then by arrival: it came before 7 and 9"


def test_it_is_counted():
    scheduler = new_scheduler()
    victim = run_it(scheduler, new_request(0, prompt=4), computed=4)
    preempt(scheduler, victim)
    assert victim.preemptions == 1
    assert scheduler.work.preemptions == 1


def test_on_its_return_prompt_and_answer_are_one_prefill():
    scheduler = new_scheduler()
    victim = run_it(scheduler, new_request(0, prompt=9, answer=3), computed=11)
    preempt(scheduler, victim)
    assert rows(scheduler.plan()) == [(0, 0, 12)], "its K and V are gone: all 12 tokens go through the model again"


def test_what_it_computed_stays_in_the_prefix_cache_while_there_is_room():
    scheduler = new_scheduler(prefix_cache="radix")
    victim = run_it(scheduler, new_request(0, prompt=9, answer=3), computed=11)

    preempt(scheduler, victim)

    assert scheduler.cache.prefix.num_pages == 2, "of 11 computed tokens, two whole pages can be found again"
    assert rows(scheduler.plan()) == [(0, 8, 4)]
    assert victim.num_cached == 0, "it reused its own work: not a prefix hit of the prompt"
