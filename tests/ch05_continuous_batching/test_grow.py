"""Task 05.5: `Scheduler._grow` gets pages for a running request, and takes them from whoever came last."""

from __future__ import annotations

from minisgl.core import Batch
from tests.ch05_continuous_batching.harness import check_pages, ids, new_request, new_scheduler, rows, run_it


def four(pages: int, **switches):
    """Four decodes whose pages are full: 8 tokens computed in 2 pages, and a ninth token known."""
    scheduler = new_scheduler(pages, **switches)
    for id in range(4):
        run_it(scheduler, new_request(id, prompt=8, answer=1), computed=8, tokens_of_pages=8)
    return scheduler


def test_free_pages_are_taken_and_nobody_is_preempted():
    scheduler, batch = four(pages=10), Batch()
    request = scheduler.running[0]

    assert scheduler._grow(batch, request, 9) is True

    assert len(request.pages) == 3, "9 tokens need 3 pages of 4"
    assert ids(scheduler.running) == [0, 1, 2, 3]
    assert batch.moved == [(request, 2)], "its page table changed from page 2 on: the engine must hear of it"


def test_who_came_last_is_preempted_first():
    scheduler, batch = four(pages=8), Batch()
    oldest = scheduler.running[0]

    assert scheduler._grow(batch, oldest, 9) is True, "the last of running gives way to the first"

    assert ids(scheduler.running) == [0, 1, 2], "the last of the line has the least to lose"
    assert ids(scheduler.waiting) == [3]
    assert len(oldest.pages) == 3
    assert scheduler.cache.pages.num_free == 1
    assert scheduler.work.preemptions == 1
    check_pages(scheduler, [*scheduler.running, *scheduler.waiting])


def test_as_many_as_needed_are_preempted_and_no_more():
    scheduler, batch = four(pages=8), Batch()
    assert scheduler._grow(batch, scheduler.running[0], 17) is True, "the last two give way to the first"
    assert ids(scheduler.running) == [0, 1], "17 tokens are 5 pages, 3 more: what two others have, and not a third"
    assert ids(scheduler.waiting) == [2, 3]


def test_a_lower_priority_is_preempted_before_a_later_arrival():
    scheduler = new_scheduler(pages=6)
    for id, priority in [(0, 0), (1, 1), (2, 1)]:
        run_it(scheduler, new_request(id, 8, answer=1, priority=priority), computed=8, tokens_of_pages=8)
    first = scheduler.running[0]

    assert scheduler._grow(Batch(), first, 9) is True

    assert first.id == 1
    assert ids(scheduler.running) == [1, 2]
    assert ids(scheduler.waiting) == [0]


def test_the_last_one_gives_up_its_own_pages_rather_than_take_an_older_ones():
    scheduler, batch = four(pages=8), Batch()
    last = scheduler.running[3]

    assert scheduler._grow(batch, last, 9) is False, "False says that the request is no longer running"

    assert ids(scheduler.running) == [0, 1, 2]
    assert ids(scheduler.waiting) == [3]
    assert last.pages == []
    assert batch.moved == [], "there is no page table to announce"
    check_pages(scheduler, [*scheduler.running, last])


def test_nobody_is_preempted_whose_step_is_in_flight():
    scheduler, batch = four(pages=8), Batch()
    scheduler.running[3].in_flight = 1  # its step was planned and not retired: it still writes to its pages

    assert scheduler._grow(batch, scheduler.running[0], 9) is False, "wait: once that step is retired, it may go"

    assert ids(scheduler.running) == [0, 1, 2, 3], "no older one pays for it either"
    assert batch.moved == []


def test_the_prefix_cache_is_emptied_before_anybody_is_preempted():
    scheduler = four(pages=10, prefix_cache="radix")
    pages = scheduler.cache.pages.alloc(2)
    scheduler.cache.prefix.insert(list(range(8)), pages)
    scheduler.cache.pages.release(pages)  # only the tree holds them

    assert scheduler._grow(Batch(), scheduler.running[0], 9) is True
    assert scheduler.work.preemptions == 0


def test_a_step_in_which_pages_run_out_computes_the_first_and_leaves_out_the_last():
    scheduler = four(pages=9)
    batch = scheduler.plan()
    assert rows(batch) == [(0, 8, 1), (1, 8, 1), (2, 8, 1)], "one page is free, and the fourth gives its two"
    assert ids(scheduler.waiting) == [3]


def test_pages_for_everybody_mean_a_step_for_everybody():
    assert ids(four(pages=12).plan().requests) == [0, 1, 2, 3]


def test_a_victim_that_the_loop_has_yet_to_reach_is_not_computed_without_pages():
    scheduler = new_scheduler(pages=6, batching="prefill_first")
    for id in range(2):  # two unfinished prompts of 20, 8 tokens computed; 2 pages are free and each wants 3
        run_it(scheduler, new_request(id, prompt=20), computed=8, tokens_of_pages=8)

    batch = scheduler.plan()

    assert rows(batch) == [(0, 8, 12)]
    assert scheduler.running[0].id == 0
    check_pages(scheduler, [*scheduler.running, *scheduler.waiting])
