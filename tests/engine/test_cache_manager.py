"""What a request holds: pages of its own, and a locked path of shared ones."""

from __future__ import annotations

import pytest

from tests.helpers import check_pool, request, scheduler_with

PAGE = 4
PROMPT = list(range(10))  # two whole pages and a half


@pytest.fixture
def cache():
    return scheduler_with(pages=8, page_size=PAGE).cache


def computed(cache, r, num_tokens):
    """Let the request run as far as num_tokens."""
    cache.attach(r)
    assert cache.grow(r, num_tokens)
    cache.publish(r, num_tokens)
    r.num_computed = num_tokens
    return r


def test_a_request_grows_by_the_pages_that_its_tokens_need(cache):
    r = request(0, PROMPT)
    cache.attach(r)

    for num_tokens, pages in ((1, 1), (4, 1), (5, 2), (10, 3), (10, 3)):
        assert cache.grow(r, num_tokens)
        assert len(r.pages) == pages


def test_growing_beyond_the_pool_changes_nothing(cache):
    computed(cache, request(0, PROMPT), 10)
    r = request(1, [90, 91])
    cache.attach(r)
    cache.grow(r, 2)
    held = list(r.pages)

    assert not cache.grow(r, 8 * PAGE)
    assert r.pages == held
    assert cache.pages.num_free == 8 - 3 - 1


def test_whole_published_pages_are_found_and_the_last_token_is_left_to_compute(cache):
    computed(cache, request(0, PROMPT), 10)
    follower = request(1, PROMPT[:8])

    cache.attach(follower)
    assert follower.num_computed == 4  # eight tokens are cached, but the last one's logits are wanted


def test_tokens_that_are_not_published_are_not_found(cache):
    first = request(0, PROMPT)
    cache.attach(first)
    cache.grow(first, 10)

    second = request(1, PROMPT)
    cache.attach(second)
    assert second.num_computed == 0


def test_another_salt_finds_nothing(cache):
    computed(cache, request(0, PROMPT, cache_salt="a"), 10)
    other = request(1, PROMPT, cache_salt="b")

    cache.attach(other)
    assert other.pages == []


def test_who_computed_the_same_tokens_later_moves_to_the_first_ones_pages(cache):
    first, second = request(0, PROMPT), request(1, PROMPT)
    for r in (first, second):
        cache.attach(r)
        cache.grow(r, 10)
    free = cache.pages.num_free

    assert not cache.publish(first, 10)
    assert cache.publish(second, 10)
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]  # a page that is not whole is its owner's
    assert cache.pages.num_free == free + 2


def test_what_a_running_request_reads_is_not_evicted_and_counts_as_taken(cache):
    reader = computed(cache, request(0, PROMPT), 10)
    assert cache.num_available == 8 - 3

    assert not cache.grow(request(1, [1]), 6 * PAGE)
    assert cache.prefix.match_prefix(reader.tokens)[1] == reader.pages[:2]


def test_what_an_ended_request_published_stays_until_room_is_needed(cache):
    ended = computed(cache, request(0, PROMPT), 10)
    cache.detach(ended)
    assert (cache.pages.num_free, cache.num_available) == (6, 8)

    big = request(1, [50] * 30)
    cache.attach(big)
    assert cache.grow(big, 8 * PAGE)
    assert cache.prefix.num_pages == 0


def test_a_detached_request_holds_nothing(cache):
    r = computed(cache, request(0, PROMPT), 10)
    cache.detach(r)

    assert (r.pages, r.node, r.num_computed) == ([], None, 0)
    check_pool(scheduler_with(pages=1), [r])


def test_without_a_prefix_cache_nothing_is_found_and_all_pages_come_back():
    cache = scheduler_with(pages=8, page_size=PAGE, prefix_cache="none").cache
    first = computed(cache, request(0, PROMPT), 10)
    second = computed(cache, request(1, PROMPT), 10)

    assert not set(first.pages) & set(second.pages)
    cache.detach(first)
    cache.detach(second)
    assert cache.pages.num_free == 8
