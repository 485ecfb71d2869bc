"""Task 03.3: `slots_of` finds a token's slot by its page table."""

from __future__ import annotations

import pytest
import torch

from minisgl.kvcache.mha_pool import slots_of


def of_one(pages: list[int], positions: list[int], page_size: int) -> list[int]:
    slots = slots_of(torch.tensor([pages]), torch.tensor([positions]), page_size)
    assert slots.shape == (1, len(positions)), (
        f"positions [1, {len(positions)}] gave slots of shape {list(slots.shape)}"
    )
    return slots[0].tolist()


def test_the_example_of_the_page():
    slots = of_one([5, 2, 7], [0, 3, 4, 6, 9], page_size=4)

    assert slots == [20, 23, 8, 10, 29], "position 6 lies in entry 1 of the table, page 2, at place 2: slot 2 · 4 + 2"


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_tokens_of_a_page_lie_side_by_side_and_pages_lie_anywhere(page_size):
    pages = [7, 2, 9, 1]
    expected = [page * page_size + offset for page in pages for offset in range(page_size)]
    actual = of_one(pages, list(range(4 * page_size)), page_size)
    for position, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert a == e, (
            f"page size {page_size}, pages {pages}: token {position} is number {position % page_size} of the page in "
            f"entry {position // page_size} of the table, so its slot is {e}, not {a}"
        )


@pytest.mark.parametrize(("position", "slot"), [(14, 62), (15, 63), (16, 16), (17, 17), (31, 31), (32, 80)])
def test_the_boundary_of_a_page(position, slot):
    assert of_one([3, 1, 5], [position], page_size=16) == [slot], f"position {position} in pages 3, 1, 5 of 16"


def test_positions_come_in_any_order_and_more_than_once():
    assert of_one([4, 6], [5, 0, 5, 2, 3], page_size=3) == [20, 12, 20, 14, 18]


def test_each_sequence_has_its_own_table():
    tables = torch.tensor([[4, 6, 1], [2, 5, 3]])
    positions = torch.tensor([[0, 4], [1, 5]])
    assert slots_of(tables, positions, 2).tolist() == [[8, 2], [5, 7]], "row b of positions goes through row b's table"


def test_entries_behind_a_sequences_pages_are_not_looked_at():
    tables = torch.tensor([[4, 10**12, -7], [2, 5, 10**12]])
    assert slots_of(tables, torch.tensor([[0, 2], [3, 5]]), 3).tolist() == [[12, 14], [15, 17]]


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_slots_beyond_32_bits_are_right(page_size):
    page = 2**31 // page_size + 3  # one layer of a pool that is described here, not allocated
    assert of_one([1, page], [page_size], page_size) == [page * page_size], "a large pool has more than 2³¹ slots"


def test_slots_are_64_bit_and_the_inputs_stay():
    table, positions = torch.tensor([[3, 8]]), torch.tensor([[0, 5, 7]])
    slots = slots_of(table, positions, 4)
    assert slots.dtype == torch.int64
    assert slots.shape == (1, 3)
    assert table.tolist() == [[3, 8]]
    assert positions.tolist() == [[0, 5, 7]]
