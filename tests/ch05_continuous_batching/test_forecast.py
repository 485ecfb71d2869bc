"""Task 05.2: `Scheduler._pages_to_come` says how many pages a request is expected to take beyond those it has."""

from __future__ import annotations

import pytest

from tests.ch05_continuous_batching.harness import new_request, new_scheduler


def forecast(page_size, reserve, prompt, max_tokens, answer=0, pages_held=0, computed=0) -> int:
    scheduler = new_scheduler(page_size=page_size, output_reserve=reserve)
    request = new_request(0, prompt, max_tokens, answer)
    assert scheduler.cache.grow(request, pages_held * page_size)
    request.num_computed = computed
    return scheduler._pages_to_come(request)


@pytest.mark.parametrize(("prompt", "pages"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_with_nothing_reserved_it_is_the_pages_of_the_known_tokens(prompt, pages):
    assert forecast(4, 0.0, prompt, max_tokens=50) == pages


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "pages", "why"),
    [
        (9, 8, 4, "17 tokens in all, of which the last is never fed back: 16 slots"),
        (9, 9, 5, "18 tokens in all, so 17 slots"),
        (5, 4, 2, "8 slots: tokens are added up before they are rounded to pages"),
        (4, 1, 1, "the only new token is the last one, so it needs no slot"),
    ],
)
def test_with_everything_reserved_it_is_the_pages_of_all_tokens_but_the_last(prompt, max_tokens, pages, why):
    assert forecast(4, 1.0, prompt, max_tokens) == pages, why


@pytest.mark.parametrize(
    ("reserve", "pages", "why"),
    [(0.0, 2, "8 tokens"), (0.5, 4, "8 + ceil(4.5) = 13 tokens"), (0.1, 3, "8 + ceil(0.9) = 9 tokens")],
)
def test_a_share_of_the_unknown_tokens_is_rounded_up(reserve, pages, why):
    assert forecast(4, reserve, prompt=8, max_tokens=10) == pages, why  # 17 slots at most, so 9 unknown


@pytest.mark.parametrize(("held", "pages"), [(1, 4), (3, 2), (5, 0)])
def test_pages_that_it_has_are_not_counted_again(held, pages):
    assert forecast(4, 1.0, prompt=9, max_tokens=9, pages_held=held) == pages


def test_a_finished_part_of_the_answer_is_known_and_the_share_is_of_what_remains():
    # 6 + 8 known, 6 + 21 - 1 slots at most: 12 unknown, half of them expected: 20 tokens
    assert forecast(4, 0.5, prompt=6, max_tokens=21, answer=8) == 5


def test_how_much_of_it_was_computed_does_not_matter():
    assert forecast(4, 0.0, prompt=12, max_tokens=4, pages_held=2, computed=8) == 1


def test_the_limit_of_the_context_counts_too():
    scheduler = new_scheduler(pages=5, output_reserve=1.0)
    request = new_request(0, prompt=9, max_tokens=1000)
    scheduler.add(request)  # cuts max_len to what the pool can hold
    assert scheduler._pages_to_come(request) == 5


@pytest.mark.parametrize(("page_size", "pages"), [(1, 40), (3, 14), (16, 3), (64, 1)])
def test_it_counts_in_pages_of_any_size(page_size, pages):
    assert forecast(page_size, 0.0, prompt=40, max_tokens=5) == pages
