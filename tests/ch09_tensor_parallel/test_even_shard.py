"""Task 09.1: equally long ranges, one for each rank."""

from __future__ import annotations

import pytest

from minisgl.distributed.comm import ALONE
from minisgl.layers.shard import even_shard
from tests.distributed.group import Seat, seats

WHOLE = [1, 2, 5, 12, 101, 1536, 49152]
SIZES = [1, 2, 3, 4, 7, 8]


@pytest.mark.parametrize(
    ("whole", "size", "ranges"),
    [
        (12, 3, [(0, 4), (4, 8), (8, 12)]),
        (101, 2, [(0, 51), (51, 101)]),
        (101, 4, [(0, 26), (26, 52), (52, 78), (78, 101)]),
        (10, 4, [(0, 3), (3, 6), (6, 9), (9, 10)]),
    ],
)
def test_ranks_hold_one_range_each_in_their_order(whole, size, ranges):
    found = [even_shard(whole, seat).ranges for seat in seats(size)]
    assert found == [(expected,) for expected in ranges], (
        f"{whole} on {size} ranks: {-(-whole // size)} each (rounded up), and none beyond {whole}"
    )


@pytest.mark.parametrize("whole", WHOLE)
def test_one_rank_holds_all(whole):
    assert even_shard(whole, ALONE).ranges == ((0, whole),)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("whole", WHOLE)
def test_nothing_is_left_out_and_nothing_is_held_twice(whole, size):
    held = [i for seat in seats(size) for first, end in even_shard(whole, seat).ranges for i in range(first, end)]
    assert held == list(range(whole))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("whole", WHOLE)
def test_all_are_equally_long_until_nothing_is_left(whole, size):
    """So that rank · length is where a rank begins, and padding, if any, is behind everything."""
    sizes = [even_shard(whole, seat).size for seat in seats(size)]
    longest = -(-whole // size)
    assert sizes == [max(0, min(longest, whole - rank * longest)) for rank in range(size)]


def test_a_rank_for_which_nothing_is_left_holds_an_empty_range():
    assert [even_shard(5, seat).ranges for seat in seats(4)][2:] == [((4, 5),), ((5, 5),)]
    assert [even_shard(2, seat).ranges for seat in seats(4)][2:] == [((2, 2),), ((2, 2),)]


@pytest.mark.parametrize("dim", [0, 1])
def test_a_shard_knows_its_dimension_and_the_length_of_the_whole(dim):
    shard = even_shard(101, Seat(1, 2), dim)
    assert (shard.whole, shard.dim) == (101, dim)


def test_rows_are_cut_unless_told_otherwise():
    assert even_shard(8, Seat(0, 2)).dim == 0
