"""Task 05.3: `Scheduler._admit` lets waiting requests run, in order, as long as budget, rows and pages allow."""

from __future__ import annotations

import random

import pytest

from tests.ch05_continuous_batching.harness import check_pages, ids, new_request, new_scheduler, rows, run_it


def queue(scheduler, *requests):
    for request in requests:
        scheduler.add(request)
    return requests


def test_prompts_are_admitted_in_order_until_the_budget_is_used_and_the_last_is_cut():
    scheduler = new_scheduler(max_batch_tokens=14)
    queue(scheduler, *(new_request(i, prompt=6) for i in range(4)))

    assert rows(scheduler.plan()) == [(0, 0, 6), (1, 0, 6), (2, 0, 2)]
    assert ids(scheduler.running) == [0, 1, 2]
    assert ids(scheduler.waiting) == [3], "with no token left in the budget, nobody else is let in"


def test_running_requests_come_first_and_new_ones_get_what_is_left():
    scheduler = new_scheduler(max_batch_tokens=8)
    run_it(scheduler, new_request(0, prompt=6, answer=1), computed=6)
    queue(scheduler, new_request(1, prompt=20))
    assert rows(scheduler.plan()) == [(0, 6, 1), (1, 0, 7)]


def test_no_more_than_max_running_requests_run():
    scheduler = new_scheduler(max_running_requests=3)
    run_it(scheduler, new_request(0, prompt=6, answer=1), computed=6)
    queue(scheduler, *(new_request(i, prompt=6) for i in range(1, 5)))
    scheduler.plan()
    assert (ids(scheduler.running), ids(scheduler.waiting)) == ([0, 1, 2], [3, 4])


def test_the_pages_of_a_chunk_are_there_and_its_page_table_is_announced():
    scheduler = new_scheduler(max_batch_tokens=9)
    [first, second] = queue(scheduler, new_request(0, prompt=5), new_request(1, prompt=30))

    batch = scheduler.plan()

    assert (len(first.pages), len(second.pages)) == (2, 1), "5 tokens need 2 pages, a chunk of 4 tokens needs 1"
    assert batch.moved == [(first, 0), (second, 0)], "the engine learns of new page tables from batch.moved"
    check_pages(scheduler, [first, second])


class TestThePool:
    def test_one_that_does_not_fit_waits_and_nobody_overtakes_it(self):
        scheduler = new_scheduler(pages=6)
        run_it(scheduler, new_request(0, prompt=12, answer=1), computed=12, tokens_of_pages=16)
        _, large, small = scheduler.running[0], *queue(scheduler, new_request(1, prompt=12), new_request(2, prompt=2))

        batch = scheduler.plan()

        assert ids(scheduler.running) == [0], "2 pages are free: request 1 needs 3, request 2 would need 1"
        assert ids(scheduler.waiting) == [1, 2], (
            "request 2 came later: if it overtook, request 1 might never find 3 free pages"
        )
        assert rows(batch) == [(0, 12, 1)]
        assert (large.pages, large.node, large.num_computed) == ([], None, 0), "a refused request holds nothing"
        assert small.pages == []
        check_pages(scheduler, [scheduler.running[0], large, small])

    def test_what_running_requests_are_expected_to_take_is_not_given_away(self):
        scheduler = new_scheduler(pages=11, output_reserve=1.0)
        run_it(scheduler, new_request(0, prompt=8, max_tokens=17, answer=1), computed=8)  # has 3 pages, will need 6
        queue(scheduler, new_request(1, prompt=8, max_tokens=9), new_request(2, prompt=8, max_tokens=9))
        # 8 pages are free, 3 of them expected to go to request 0; each newcomer is expected to take 4

        scheduler.plan()

        assert ids(scheduler.running) == [0, 1], "3 + 4 of 8 pages are spoken for: another 4 are not there"
        assert ids(scheduler.waiting) == [2]

    def test_what_those_admitted_in_this_step_are_expected_to_take_counts_as_well(self):
        scheduler = new_scheduler(pages=10, output_reserve=1.0)
        queue(scheduler, *(new_request(i, prompt=4, max_tokens=13) for i in range(3)))  # 4 pages each in the end
        scheduler.plan()
        assert ids(scheduler.running) == [0, 1], "8 of 10 pages are spoken for: the third, with 4, waits"

    @pytest.mark.parametrize("page_size", [1, 3, 4, 16])
    def test_prompts_are_counted_in_whole_pages(self, page_size):
        scheduler = new_scheduler(pages=8, page_size=page_size)
        queue(scheduler, *(new_request(i, prompt=page_size + 1) for i in range(6)))  # 2 pages each
        scheduler.plan()
        assert ids(scheduler.running) == [0, 1, 2, 3], f"8 pages of {page_size}, and each prompt needs 2"

    def test_a_forecast_that_fits_exactly_is_admitted(self):
        scheduler = new_scheduler(pages=8, output_reserve=1.0)
        queue(scheduler, *(new_request(i, prompt=4, max_tokens=13) for i in range(2)))
        scheduler.plan()
        assert ids(scheduler.running) == [0, 1]


class TestWithoutChunks:
    def test_a_prompt_that_exceeds_what_is_left_of_the_budget_waits_and_nobody_overtakes_it(self):
        scheduler = new_scheduler(max_batch_tokens=10, chunked_prefill=False)
        queue(scheduler, new_request(0, prompt=6), new_request(1, prompt=6), new_request(2, prompt=2))
        assert rows(scheduler.plan()) == [(0, 0, 6)], "4 of the budget are left: request 1 waits, and 2 behind it"
        assert ids(scheduler.waiting) == [1, 2]

    def test_one_that_exceeds_the_whole_budget_runs_whole_and_alone(self):
        scheduler = new_scheduler(max_batch_tokens=10, chunked_prefill=False)
        queue(scheduler, new_request(0, prompt=25), new_request(1, prompt=2))
        assert rows(scheduler.plan()) == [(0, 0, 25)], "it will never fit: waiting gains nothing"

    def test_it_does_not_join_a_step_that_others_are_in(self):
        scheduler = new_scheduler(max_batch_tokens=10, chunked_prefill=False)
        run_it(scheduler, new_request(0, prompt=6, answer=1), computed=6)
        queue(scheduler, new_request(1, prompt=25))
        assert rows(scheduler.plan()) == [(0, 6, 1)], "what exceeds the budget runs only where the batch is empty"


class TestWithAPrefixCache:
    def cached(self, scheduler, tokens):
        """Have the tree hold these tokens, as if an earlier request had computed them."""
        pages = scheduler.cache.pages.alloc(len(tokens) // 4)
        scheduler.cache.prefix.insert(tokens, pages)
        scheduler.cache.pages.release(pages)

    def test_only_what_is_not_cached_is_computed_and_counted_against_the_budget(self):
        scheduler = new_scheduler(prefix_cache="radix", max_batch_tokens=6)
        prompt = list(range(10))
        self.cached(scheduler, prompt[:8])
        hit, other = queue(scheduler, new_request(0, prompt), new_request(1, prompt=9))

        batch = scheduler.plan()

        assert rows(batch) == [(0, 8, 2), (1, 0, 4)], "8 of the 10 tokens are cached"
        assert (len(hit.pages), len(other.pages)) == (3, 1), "pages must hold the cached tokens and the new ones"
        assert batch.moved == [(hit, 0), (other, 0)], "all pages are there before the request is announced, once"
        assert hit.num_cached == 8
        check_pages(scheduler, [hit, other])

    def test_a_refused_request_leaves_the_tree_unlocked(self):
        scheduler = new_scheduler(pages=4, prefix_cache="radix")
        run_it(scheduler, new_request(9, prompt=5), computed=5)  # 2 of 4 pages
        prompt = list(range(12))
        self.cached(scheduler, prompt[:4])
        [request] = queue(scheduler, new_request(10, prompt))

        scheduler.plan()

        assert ids(scheduler.waiting) == [10], "one page is cached, one free; 3 are needed"
        assert scheduler.cache.prefix.num_evictable == 1, "its prefix is still locked: give back what attach took"
        check_pages(scheduler, [request, *scheduler.running])

    def test_the_policy_chooses_the_order(self):
        scheduler = new_scheduler(prefix_cache="radix", policy="lpm", max_running_requests=1)
        prompt = list(range(10))
        self.cached(scheduler, prompt[:8])
        queue(scheduler, new_request(0, prompt=4), new_request(1, prompt))
        assert rows(scheduler.plan()) == [(1, 8, 2)], "longest cached prefix first"


class TestOrder:
    def test_the_order_is_that_of_arrival_whatever_the_objects_addresses_are(self):
        numbers = list(range(60))
        random.Random(0).shuffle(numbers)
        made = {number: new_request(number, prompt=2) for number in numbers}
        scheduler = new_scheduler()
        queue(scheduler, *(made[number] for number in range(60)))
        assert ids(scheduler.plan().requests) == list(range(60))

    def test_a_higher_priority_goes_first(self):
        scheduler = new_scheduler(max_batch_tokens=8)
        queue(scheduler, new_request(0, prompt=6), new_request(1, prompt=6, priority=1))
        assert rows(scheduler.plan()) == [(1, 0, 6), (0, 0, 2)]

    def test_running_requests_stay_in_order_of_rank(self):
        scheduler = new_scheduler()
        run_it(scheduler, new_request(5, prompt=6, answer=1), computed=6)
        queue(scheduler, new_request(6, prompt=4), new_request(7, prompt=4, priority=1))
        scheduler.plan()
        assert ids(scheduler.running) == [7, 5, 6], "the last of the line is the first to be preempted"
