"""Task 03.2: `PageAllocator.release` takes one holder away; a page is free when it was the last."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.kvcache.pages import PageAllocator


def test_a_page_with_one_holder_is_free_again():
    pages = PageAllocator(num_pages=4)
    [page] = pages.alloc(1)
    pages.release([page])
    assert pages.holders(page) == 0
    assert pages.num_free == 3
    assert sorted(pages.alloc(3)) == [1, 2, 3], "a free page must be handed out again, once"


def test_a_shared_page_is_free_only_after_its_last_holder_releases_it():
    pages = PageAllocator(num_pages=4)
    [page] = pages.alloc(1)
    pages.hold([page])
    pages.hold([page])  # three read it now

    for left in (2, 1):
        pages.release([page])
        assert pages.holders(page) == left
        assert pages.num_free == 2, f"{left} still read page {page}, but it was given back"
    pages.release([page])
    assert pages.num_free == 3


def test_a_page_that_somebody_still_holds_is_not_handed_out():
    pages = PageAllocator(num_pages=3)
    shared, own = pages.alloc(2)
    pages.hold([shared])
    pages.release([shared, own])
    assert pages.alloc(1) == [own]


def test_each_page_of_the_call_loses_one_holder():
    pages = PageAllocator(num_pages=6)
    first, second, third = pages.alloc(3)
    pages.hold([second, third])
    pages.release([first, second])
    assert [pages.holders(page) for page in (first, second, third)] == [0, 1, 2]
    assert pages.num_free == 3


@pytest.mark.parametrize("page", [0, 2])
def test_releasing_a_free_page_is_a_bug_of_ours_and_stops(page):
    pages = PageAllocator(num_pages=4)
    assert pages.alloc(1) == [1]
    with pytest.raises(AssertionError, match=str(page)):
        pages.release([page])
    assert pages.num_free == 2, "a page that is free already must not stand in the free list twice"


def test_any_iterable_will_do_and_the_callers_list_stays():
    pages = PageAllocator(num_pages=6)
    taken = pages.alloc(4)
    copy = list(taken)
    pages.release(page for page in taken[:2])
    pages.release(taken[2:])
    assert taken == copy
    assert pages.num_free == 5


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_after_any_sequence_of_calls_a_page_is_free_exactly_when_nobody_holds_it(data):
    pages = PageAllocator(num_pages=9)
    holds: list[int] = []  # one entry for each holder of each page
    for _ in range(data.draw(st.integers(1, 25), label="calls")):
        action = data.draw(st.sampled_from(["alloc", "hold", "release"]), label="action")
        if action == "alloc":
            holds += pages.alloc(data.draw(st.integers(0, pages.num_free), label="n"))
        elif holds:
            chosen = data.draw(st.lists(st.sampled_from(holds), unique=True, max_size=4), label="pages")
            if action == "hold":
                pages.hold(chosen)
                holds += chosen
            else:
                pages.release(chosen)
                for page in chosen:
                    holds.remove(page)
        assert [pages.holders(page) for page in range(9)] == [holds.count(page) for page in range(9)]
        assert pages.num_free == 8 - len(set(holds))
    assert sorted({*holds, *pages.alloc(pages.num_free)}) == list(range(1, 9)), "a page is lost, or was there twice"
