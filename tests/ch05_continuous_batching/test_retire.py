"""Task 05.6: `Scheduler.retire` takes in a step's tokens, ends requests, and drops what came too late."""

from __future__ import annotations

import pytest

from tests.ch05_continuous_batching.harness import EOS, check_pages, ids, new_request, new_scheduler, rows, run_it

TOKEN = 42


def with_decode(max_tokens=8, answer=1, **switches):
    scheduler = new_scheduler(**switches)
    request = run_it(scheduler, new_request(0, prompt=6, max_tokens=max_tokens, answer=answer), computed=5 + answer)
    return scheduler, request


def test_a_decode_grows_by_its_token():
    scheduler, request = with_decode()
    grown = scheduler.retire(scheduler.plan(), [TOKEN])
    assert grown == [request]
    assert request.output == [500, TOKEN]
    assert request.in_flight == 0


def test_a_retired_step_is_in_flight_no_more():
    scheduler, _ = with_decode()
    batch = scheduler.plan()
    assert scheduler.in_flight == [batch]
    scheduler.retire(batch, [TOKEN])
    assert scheduler.in_flight == [], "retire begins with _hold_for_later_steps, which takes the step off this list"


def test_tokens_belong_to_the_rows_of_the_batch():
    scheduler = new_scheduler(max_batch_tokens=4)
    for id in range(3):
        run_it(scheduler, new_request(id, prompt=5, answer=1), computed=5)
    scheduler.running[0].num_computed = 6  # its next token is unknown: it has no row
    batch = scheduler.plan()

    scheduler.retire(batch, [TOKEN, TOKEN + 1])

    assert ids(batch.requests) == [1, 2]
    assert [r.output[-1] for r in scheduler.running] == [500, TOKEN, TOKEN + 1]


class TestChunks:
    def test_the_token_behind_an_unfinished_chunk_is_not_part_of_the_answer(self):
        scheduler = new_scheduler(max_batch_tokens=4)
        request = new_request(0, prompt=10)
        scheduler.add(request)

        for _ in range(2):
            grown = scheduler.retire(scheduler.plan(), [TOKEN])
            assert grown == [], "the row ends before the last token of the prompt: an unfinished chunk"
            assert request.output == [], "the prompt is not computed to its end: nobody asked what follows here"
        grown = scheduler.retire(scheduler.plan(), [TOKEN])

        assert grown == [request]
        assert request.output == [TOKEN]

    def test_an_end_of_sequence_behind_an_unfinished_chunk_ends_nothing(self):
        scheduler = new_scheduler(max_batch_tokens=4)
        request = new_request(0, prompt=10)
        scheduler.add(request)
        scheduler.retire(scheduler.plan(), [EOS])
        assert request.finish_reason is None, "the entry behind an unfinished chunk means nothing"
        assert ids(scheduler.running) == [0]

    def test_minus_one_behind_an_unfinished_chunk_is_no_error(self):
        scheduler = new_scheduler(max_batch_tokens=4)
        request = new_request(0, prompt=10)
        scheduler.add(request)
        scheduler.retire(scheduler.plan(), [-1])
        assert request.finish_reason is None, "the entry behind an unfinished chunk means nothing"


class TestTheEnd:
    def test_a_stop_token_ends_the_answer_and_is_part_of_it_once(self):
        scheduler, request = with_decode()
        assert scheduler.retire(scheduler.plan(), [EOS]) == [request]
        assert request.output == [500, EOS], "500 was known, and the stop token stays in the answer"
        assert request.finish_reason == "stop"

    def test_max_tokens_end_the_answer(self):
        scheduler, request = with_decode(max_tokens=3)
        scheduler.retire(scheduler.plan(), [TOKEN])
        assert (len(request.output), request.finish_reason) == (2, None), "one more token may come"
        scheduler.retire(scheduler.plan(), [TOKEN])
        assert (len(request.output), request.finish_reason) == (3, "length")

    def test_a_stop_token_in_the_last_place_is_a_stop(self):
        scheduler, request = with_decode(max_tokens=2)
        scheduler.retire(scheduler.plan(), [EOS])
        assert request.finish_reason == "stop", "ask for the stop token first, for the length afterwards"

    def test_who_has_finished_gives_its_pages_back_and_is_in_no_further_step(self):
        scheduler, first = with_decode(max_tokens=2)
        second = run_it(scheduler, new_request(1, prompt=6, answer=1), computed=6)

        scheduler.retire(scheduler.plan(), [TOKEN, TOKEN])

        assert ids(scheduler.finished) == [0]
        assert ids(scheduler.running) == [1], "retire takes those with a finish_reason out of running"
        assert (first.pages, first.row) == ([], -1), "nobody reads its pages any more: _finish gives them back"
        check_pages(scheduler, [first, second])
        assert rows(scheduler.plan()) == [(1, 7, 1)]

    def test_no_valid_token_is_an_error_of_that_request_alone(self):
        scheduler, broken = with_decode()
        fine = run_it(scheduler, new_request(1, prompt=6, answer=1), computed=6)

        grown = scheduler.retire(scheduler.plan(), [-1, TOKEN])

        assert (broken.finish_reason, broken.output) == ("error", [500])
        assert "NaN" in broken.error
        assert grown == [fine]
        assert ids(scheduler.running) == [1]


class TestLateTokens:
    def test_an_aborted_request_keeps_its_pages_until_its_step_is_retired_and_its_token_is_dropped(self):
        scheduler, request = with_decode(pages=8)
        batch = scheduler.plan()
        scheduler.abort(0)

        assert len(request.pages) == 2, "the step that runs still writes there"
        grown = scheduler.retire(batch, [TOKEN])

        assert grown == []
        assert request.output == [500], "the token came too late"
        assert request.finish_reason == "abort"
        assert (request.pages, request.row) == ([], -1)
        assert scheduler.cache.pages.num_free == 8
        check_pages(scheduler, [request])

    def test_with_two_steps_in_flight_the_pages_go_back_with_the_second(self):
        scheduler = new_scheduler(pages=8, max_batch_tokens=4)
        request = new_request(0, prompt=10)
        scheduler.add(request)
        first, second = scheduler.plan(), scheduler.plan()
        assert rows(second) == [(0, 4, 4)]
        scheduler.abort(0)

        scheduler.retire(first, [TOKEN])
        assert len(request.pages) == 2, "the second step still writes there"
        scheduler.retire(second, [TOKEN])
        assert request.pages == []
        assert scheduler.cache.pages.num_free == 8

    def test_a_token_behind_the_end_is_dropped(self):
        scheduler, request = with_decode(max_tokens=4)
        batch = scheduler.plan()
        scheduler.abort(0, "stop")  # a stop string was found while the step ran
        scheduler.retire(batch, [TOKEN])
        assert request.output == [500]
        assert request.finish_reason == "stop"

    def test_others_in_the_step_get_theirs(self):
        scheduler, _ = with_decode()
        other = run_it(scheduler, new_request(1, prompt=6, answer=1), computed=6)
        batch = scheduler.plan()
        scheduler.abort(0)
        assert scheduler.retire(batch, [TOKEN, TOKEN + 1]) == [other]
        assert other.output == [500, TOKEN + 1]


class TestThePrefixCache:
    def test_a_chunk_can_be_found_when_its_step_is_retired_and_not_before(self):
        scheduler = new_scheduler(prefix_cache="radix", max_batch_tokens=8)
        request = new_request(0, prompt=20)
        scheduler.add(request)

        first, second = scheduler.plan(), scheduler.plan()
        assert scheduler.cache.prefix.num_pages == 0, "nothing was computed yet"
        scheduler.retire(first, [TOKEN])
        assert scheduler.cache.prefix.num_pages == 2, "8 tokens went through the model; the next 8 are still in flight"
        scheduler.retire(second, [TOKEN])
        assert scheduler.cache.prefix.num_pages == 4

    def test_two_equal_prompts_in_one_step_end_on_the_same_pages_and_the_engine_hears_of_it(self):
        scheduler = new_scheduler(prefix_cache="radix")
        first, second = new_request(0, list(range(9))), new_request(1, list(range(9)))
        scheduler.add(first)
        scheduler.add(second)

        scheduler.retire(scheduler.plan(), [TOKEN, TOKEN])
        batch = scheduler.plan()

        assert first.pages[:2] == second.pages[:2]
        assert (second, 0) in batch.moved, "its page table changed: the next step must not read the old pages"
        check_pages(scheduler, [first, second])

    def test_pages_that_were_swapped_stay_held_for_the_steps_planned_with_them(self):
        scheduler = new_scheduler(prefix_cache="radix", max_batch_tokens=12)
        for id in range(2):
            scheduler.add(new_request(id, list(range(20))))
        steps = [scheduler.plan() for _ in range(3)]
        assert [rows(step) for step in steps] == [[(0, 0, 12)], [(0, 12, 8), (1, 0, 4)], [(1, 4, 12)]]
        second = scheduler.running[1]
        own = second.pages[0]

        scheduler.retire(steps[0], [TOKEN])
        scheduler.retire(steps[1], [TOKEN, TOKEN])
        assert second.pages[0] != own, "the first request's page 0 holds the same tokens"
        assert scheduler.cache.pages.holders(own) == 1, "the third step was planned with this page and still reads it"
        scheduler.retire(steps[2], [TOKEN])
        assert scheduler.cache.pages.holders(own) == 0, "nothing reads it any more"


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_an_answer_has_exactly_max_tokens_and_its_last_token_is_never_computed(max_tokens):
    scheduler = new_scheduler()
    request = new_request(0, prompt=6, max_tokens=max_tokens)
    scheduler.add(request)
    computed = 0
    while batch := scheduler.plan():
        computed += batch.total_tokens
        scheduler.retire(batch, [TOKEN])
    assert request.output == [TOKEN] * max_tokens
    assert computed == 6 + max_tokens - 1
