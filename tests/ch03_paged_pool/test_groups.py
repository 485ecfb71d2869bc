"""Task 03.5: `make_groups` says which slots each query of a step reads, and whom it shares a gather with."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.attention.torch_backend import Group, make_groups
from tests.ch03_paged_pool.scene import Sequence, rows_of, sequences

STEPS = {
    "one decode": [(1, 7)],
    "one whole prompt": [(6, 6)],
    "one chunk": [(4, 11)],
    "two equal decodes": [(1, 6), (1, 6)],
    "two decodes": [(1, 4), (1, 7)],
    "the longer first": [(1, 7), (1, 5)],
    "a prompt of one token": [(1, 1), (1, 1)],
    "decodes of many lengths": [(1, n) for n in (1, 2, 3, 5, 8, 9, 15, 16, 17, 31, 33)],
    "a chunk before decodes": [(5, 9), (1, 6), (1, 5)],
    "decodes before a chunk": [(1, 6), (1, 5), (5, 9)],
    "all mixed": [(1, 17), (6, 6), (1, 18), (3, 12), (1, 2), (3, 30), (1, 20)],
}


def in_order(step: list[Sequence]) -> list[tuple[Sequence, int]]:
    """The step's queries: each a sequence and a position."""
    return [(s, s.total - s.new + t) for s in step for t in range(s.new)]


def visible(group: Group, row: int, t: int) -> list[int]:
    """The slots that query t of a group's row reads."""
    slots = group.slots[row]
    return (slots if group.mask is None else slots[group.mask[row, 0, t]]).tolist()


def check(step: list[Sequence]) -> list[Group]:
    """Every query stands in one group and reads what it must: itself and all before it, each once."""
    groups, queries, seen = make_groups(rows_of(step), step[0].page_size), in_order(step), []
    for group in groups:
        size, new = len(group.slots), len(group.queries) // len(group.slots)
        assert group.queries.shape == (size * new,)
        assert group.slots.dtype == group.queries.dtype == torch.int64
        if group.mask is not None:
            assert group.mask.shape == (size, 1, new, group.slots.shape[1]), "mask is [G, 1, n, S]"
            assert group.mask.dtype == torch.bool
        for i, query in enumerate(group.queries.tolist()):
            row, t = divmod(i, new)
            sequence, position = queries[query]
            assert sorted(visible(group, row, t)) == sorted(sequence.slots[: position + 1]), (
                f"row {query} of q is position {position} of a sequence of {sequence.total} tokens: it must read the "
                f"slots of tokens 0 … {position}, and no others"
            )
            unused = set(group.slots[row].tolist()) - set(sequence.slots)
            assert not unused, f"slots {unused} hold no token of this sequence: even masked, they are gathered"
            seen.append(query)
    assert sorted(seen) == list(range(len(queries))), f"each row of q once, over all groups; they name {sorted(seen)}"
    return groups


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("name", STEPS)
def test_each_query_reads_itself_and_everything_before_it(name, page_size):
    check(sequences(STEPS[name], page_size))


@pytest.mark.parametrize("page_size", [3, 16])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_lengths_at_the_boundary_of_a_page(page_size, offset):
    total = 2 * page_size + offset
    check(sequences([(1, total), (1, total + 1), (total, total), (2, total)], page_size))


SPANS = st.integers(1, 40).flatmap(
    lambda total: st.sampled_from([(1, total), ((total + 1) // 2, total), (total, total)])
)


@settings(max_examples=60, deadline=None)
@given(spans=st.lists(SPANS, min_size=1, max_size=8), page_size=st.sampled_from([1, 2, 3, 16]))
def test_any_mixture_of_prompts_chunks_and_decodes(spans, page_size):
    check(sequences(spans, page_size))


def test_the_queries_of_a_chunk_stand_in_the_order_of_their_positions():
    [group] = check(sequences([(4, 9)], page_size=3))
    assert group.queries.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("lengths", [[32, 63], [33, 40, 63, 47], [5, 7], [4, 4, 4]])
def test_decodes_whose_lengths_have_the_same_number_of_bits_share_a_gather(lengths):
    groups = check(sequences([(1, n) for n in lengths], page_size=4))
    assert len(groups) == 1, f"lengths {lengths} have {lengths[0].bit_length()} bits each: one group, not {len(groups)}"
    assert groups[0].slots.shape == (len(lengths), max(lengths)), "S is the longest of the group"


def test_nobody_is_padded_to_twice_its_length():
    step = sequences([(1, n) for n in range(1, 130)], page_size=4)
    groups = check(step)
    assert len(groups) == 8, f"129 has 8 bits, so lengths 1 … 129 make 8 groups, not {len(groups)}"
    for group in groups:
        for query in group.queries.tolist():
            total = step[query].total
            assert group.slots.shape[1] < 2 * total, f"a sequence of {total} was padded to {group.slots.shape[1]}"


def test_each_chunk_is_a_group_of_its_own():
    groups = check(sequences([(3, 8), (3, 8), (1, 8), (1, 9)], page_size=4))
    sizes = sorted(len(group.queries) for group in groups)
    assert sizes == [2, 3, 3], (
        f"two chunks of 3, each alone, and two decodes of 4 bits together: groups of {sizes} rows"
    )


def test_padding_repeats_the_last_slot():
    [group] = check(sequences([(1, 4), (1, 7)], page_size=3))
    short, long = sorted(group.slots.tolist(), key=lambda slots: len(set(slots)))
    assert short[4:] == [short[3]] * 3, "a slot of the sequence itself is finite and is held by it"
    assert len(set(long)) == 7


@pytest.mark.parametrize("page_size", [1, 16])
def test_slots_beyond_32_bits_are_right(page_size):
    check(sequences([(1, 20), (1, 18), (5, 9)], page_size, first_page=2**31 // page_size + 5))
