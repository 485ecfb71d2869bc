"""Tasks 04.1 to 04.6 as requests use them, through the cache manager: who holds a page, and when it may be found."""

from __future__ import annotations

from collections import Counter

import pytest

from minisgl.core import Request, SamplingParams
from minisgl.kvcache.cache_manager import CacheManager
from tests.ch04_radix_reuse.trees import Tree, spell

SIZE = 4


class Desk:
    """A tree with its cache manager, and requests that compute their whole prompt when they are told to."""

    def __init__(self, num_pages: int = 64) -> None:
        self.tree = Tree(SIZE, num_pages)
        self.manager = CacheManager(self.tree.pages, SIZE, self.tree.cache)
        self.requests: list[Request] = []

    def arrive(self, text: str, more: int = 1, salt: str = "") -> Request:
        """A request for these pages and `more` tokens behind them, with pages for its whole prompt."""
        tokens = [*spell(text, SIZE), *range(1000, 1000 + more)]
        request = Request(len(self.requests), tokens, SamplingParams(cache_salt=salt))
        self.requests.append(request)
        self.manager.attach(request)
        assert self.manager.grow(request, len(tokens))
        return request

    def compute(self, request: Request, num_tokens: int | None = None) -> bool:
        """The forward of the first num_tokens is over."""
        request.num_computed = num_tokens or len(request.tokens)
        return self.manager.publish(request, request.num_computed)

    def check(self) -> None:
        self.tree.check(Counter(page for request in self.requests for page in request.pages))


def test_a_second_request_gets_the_firsts_pages_and_computes_the_rest():
    desk = Desk()
    first = desk.arrive("AB")
    desk.compute(first)

    second = desk.arrive("ABC")

    assert second.pages[:2] == first.pages[:2], "the same pages, not copies"
    assert second.num_computed == 2 * SIZE
    assert [desk.tree.pages.holders(page) for page in second.pages[:2]] == [3, 3], "two requests and the tree"
    desk.check()


def test_nothing_is_found_before_it_is_computed():
    desk = Desk()
    first = desk.arrive("ABC")
    assert desk.arrive("ABC").num_computed == 0, "the first one's forward has not run: its pages hold nothing yet"

    desk.compute(first, num_tokens=6)  # a chunk: one page and a half

    assert desk.arrive("ABC").num_computed == SIZE, "only the whole pages of what was computed"
    desk.check()


def test_an_answer_is_found_by_the_next_turn():
    desk = Desk()
    first = desk.arrive("AB", more=0)
    first.tokens += [*spell("CD", SIZE), 7]  # the answer; its last token is never fed
    desk.manager.grow(first, 4 * SIZE)
    desk.compute(first, 4 * SIZE)
    desk.manager.detach(first)

    assert desk.arrive("ABCDE").num_computed == 4 * SIZE
    desk.check()


def test_of_two_equal_prompts_computed_in_one_step_the_second_moves_over():
    desk = Desk()
    first, second = desk.arrive("AB"), desk.arrive("AB")
    own = list(second.pages)
    assert not set(first.pages) & set(own), "neither could find the other's pages"

    assert desk.compute(first) is False
    assert desk.compute(second) is True, "publish says that the page table changed: the engine must send it again"

    assert second.pages == [*first.pages[:2], own[2]], (
        "the duplicates go back, so the page table must name the pages that stay (mini-sglang's PR 142 freed them "
        "under the reader)"
    )
    assert [desk.tree.pages.holders(page) for page in own] == [0, 0, 1]
    desk.check()


def test_pages_outlive_the_request_that_computed_them_and_go_with_the_last_holder():
    desk = Desk()
    first = desk.arrive("AB")
    desk.compute(first)
    second = desk.arrive("ABC")
    desk.compute(second)

    desk.manager.detach(first)
    assert desk.tree.cache.num_evictable == 0, "the second one reads A, B and C"
    desk.check()

    desk.manager.detach(second)
    assert desk.tree.cache.num_evictable == 3, "now only the tree holds them"
    assert desk.tree.pages.num_free == desk.tree.pages.capacity - 3
    desk.check()


def test_a_request_that_decodes_across_pages_keeps_one_lock_on_its_path():
    desk = Desk()
    request = desk.arrive("A", more=0)
    for letter in "BCD":
        desk.compute(request)
        request.tokens += spell(letter, SIZE)
        desk.manager.grow(request, len(request.tokens))
    desk.compute(request)
    assert {node.locks for node in desk.tree.nodes()} == {1}

    desk.manager.detach(request)

    assert {node.locks for node in desk.tree.nodes()} == {0}
    assert desk.tree.cache.num_evictable == 4
    desk.check()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_requests_that_share_a_path_may_leave_in_any_order(order):
    desk = Desk()
    for text in ("ABCD", "AB", "ABX"):
        desk.compute(desk.arrive(text))
        desk.check()
    for i in order:
        desk.manager.detach(desk.requests[i])
        desk.check()
    assert desk.tree.cache.num_evictable == desk.tree.cache.num_pages == 5


def test_a_request_of_another_salt_shares_nothing():
    desk = Desk()
    desk.compute(desk.arrive("AB", salt="alice"))
    other = desk.arrive("AB", salt="bob")
    assert other.num_computed == 0
    assert desk.compute(other) is False
    desk.check()
