"""Task 09.2: the KV heads that a rank's query heads read, some of them on several ranks."""

from __future__ import annotations

from math import gcd

import pytest

from minisgl.distributed.comm import ALONE
from minisgl.layers.shard import kv_heads_of
from tests.distributed.group import seats

CASES = [(24, kv, size) for kv in (1, 2, 3, 4, 6, 8, 12, 24) for size in (1, 2, 3, 4, 6, 8, 12, 24)]
CASES += [(9, 3, 3), (9, 3, 9), (9, 9, 3), (20, 4, 10), (64, 8, 16), (12, 3, 2)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "held"),
    [
        (9, 3, [[0], [1], [2]]),
        (16, 8, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (12, 12, [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]),
    ],
    ids=["SmolLM2-on-3", "Qwen3-0.6B-on-2", "one-each"],
)
def test_where_they_divide_each_rank_has_its_part(heads, kv_heads, held):
    assert [kv_heads_of(heads, kv_heads, seat) for seat in seats(len(held))] == held


@pytest.mark.parametrize(
    ("heads", "kv_heads", "held"),
    [
        (12, 1, [[0], [0], [0], [0]]),
        (12, 2, [[0], [0], [1], [1]]),
        (64, 8, [[rank // 2] for rank in range(16)]),
    ],
)
def test_with_fewer_kv_heads_than_ranks_several_ranks_hold_the_same(heads, kv_heads, held):
    assert [kv_heads_of(heads, kv_heads, seat) for seat in seats(len(held))] == held


@pytest.mark.parametrize(
    ("heads", "kv_heads", "held"),
    [
        (12, 3, [[0, 0, 1], [1, 2, 2]]),  # query heads 4 … 7 read KV head 1: two of them are on each rank
        (12, 2, [[0, 0], [0, 1], [1, 1]]),
        (12, 3, [[0, 0, 0], [0, 1, 1], [1, 1, 2], [2, 2, 2]]),
    ],
)
def test_where_a_group_is_cut_a_kv_head_stands_twice_so_that_the_groups_are_equal(heads, kv_heads, held):
    assert [kv_heads_of(heads, kv_heads, seat) for seat in seats(len(held))] == held, (
        f"{heads // len(held)} query heads a rank, of which {heads // kv_heads} in a row read the same KV head: "
        "the largest equal groups that read one KV head each"
    )


def test_one_rank_has_them_all():
    assert kv_heads_of(12, 3, ALONE) == [0, 1, 2]


@pytest.mark.parametrize(("heads", "kv_heads", "size"), CASES)
def test_each_query_head_finds_the_kv_head_that_it_had(heads, kv_heads, size):
    """Attention takes query head i of a rank to its KV head i // (query heads / KV heads), as with one rank."""
    local = heads // size
    for seat in seats(size):
        held = kv_heads_of(heads, kv_heads, seat)
        assert local % len(held) == 0, f"{local} query heads do not fall into {len(held)} equal groups"
        read = [held[i // (local // len(held))] for i in range(local)]
        whole = [head // (heads // kv_heads) for head in range(seat.rank * local, (seat.rank + 1) * local)]
        assert read == whole, f"rank {seat.rank} of {size}: query heads read KV heads {read} in place of {whole}"


@pytest.mark.parametrize(("heads", "kv_heads", "size"), CASES)
def test_all_ranks_hold_equally_many(heads, kv_heads, size):
    """The pool has a place for each, and a page is a page on all ranks."""
    counts = [len(kv_heads_of(heads, kv_heads, seat)) for seat in seats(size)]
    assert len(set(counts)) == 1, f"the ranks hold {counts} KV heads"


@pytest.mark.parametrize(("heads", "kv_heads", "size"), CASES)
def test_no_more_are_held_than_that_needs(heads, kv_heads, size):
    local, group = heads // size, heads // kv_heads
    fewest = local // gcd(group, local)
    for seat in seats(size):
        held = kv_heads_of(heads, kv_heads, seat)
        assert len(held) == fewest, f"{len(held)} KV heads for {local} query heads of groups of {group}"
