"""Task 03.1: `PageAllocator.alloc` takes pages for one holder, all or nothing."""

from __future__ import annotations

import pytest

from minisgl.kvcache.pages import OutOfPages, PageAllocator


@pytest.mark.parametrize("n", [1, 2, 5])
def test_as_many_pages_come_as_were_asked_for_each_held_once(n):
    pages = PageAllocator(num_pages=8)
    taken = pages.alloc(n)
    assert len(taken) == n, f"alloc({n}) returned {len(taken)} pages"
    assert len(set(taken)) == n, f"a page came twice: {taken}"
    assert [pages.holders(page) for page in taken] == [1] * n, "whoever allocates a page is its first holder"
    assert pages.num_free == 7 - n, f"7 pages can be handed out and {n} are gone, yet num_free is {pages.num_free}"


def test_a_page_is_never_handed_out_to_two():
    pages = PageAllocator(num_pages=8)
    first, second, third = pages.alloc(2), pages.alloc(3), pages.alloc(2)
    assert len({*first, *second, *third}) == 7, f"the same page went to two: {first}, {second}, {third}"


def test_the_dummy_page_is_never_handed_out():
    pages = PageAllocator(num_pages=5)
    taken = pages.alloc(4)
    assert sorted(taken) == [1, 2, 3, 4], f"pages 1 … 4 can be handed out, 0 is the dummy; alloc(4) gave {taken}"
    assert pages.holders(0) == 0


@pytest.mark.parametrize("taken_before", [0, 1, 3])
def test_the_last_free_page_may_be_taken(taken_before):
    pages = PageAllocator(num_pages=5)
    pages.alloc(taken_before)
    assert len(pages.alloc(4 - taken_before)) == 4 - taken_before
    assert pages.num_free == 0


@pytest.mark.parametrize(("taken_before", "asked"), [(0, 5), (3, 2), (4, 1)])
def test_one_page_too_many_is_refused_and_the_message_says_how_many_there_were(taken_before, asked):
    pages = PageAllocator(num_pages=5)
    pages.alloc(taken_before)
    with pytest.raises(OutOfPages) as refusal:
        pages.alloc(asked)
    message = str(refusal.value)
    assert str(asked) in message, f"{message!r} does not say that {asked} pages were asked for"
    assert str(4 - taken_before) in message, (
        f"{message!r} does not say that {4 - taken_before} were free before the call"
    )


def test_a_refused_call_changes_nothing():
    pages = PageAllocator(num_pages=8)
    held = pages.alloc(3)

    with pytest.raises(OutOfPages):
        pages.alloc(5)

    assert pages.num_free == 4, f"4 pages were free before the refused call, now {pages.num_free}: check before you pop"
    assert [pages.holders(page) for page in range(8)] == [int(page in held) for page in range(8)], (
        "a refused call left a page with a holder that nobody knows of"
    )
    rest = pages.alloc(4)
    assert sorted(held + rest) == list(range(1, 8)), "after a refused call not every free page can be allocated"


def test_no_page_is_a_list_of_none():
    pages = PageAllocator(num_pages=2)
    pages.alloc(1)
    assert pages.alloc(0) == [], "a request that needs no more pages must not fail when none is free"


def test_the_list_belongs_to_the_caller():
    pages = PageAllocator(num_pages=5)
    mine = pages.alloc(2)
    mine.append(99)
    assert sorted(pages.alloc(2) + mine[:2]) == [1, 2, 3, 4], "the caller's page table grows: share no list with it"
