"""Task 08.3: a step leaves its tokens where the next one looks for them."""

from __future__ import annotations

import pytest
import torch
from minisgl_kernels.graphs import new_graph
from minisgl_kernels.reference import decode_rows, keep_tokens

from tests.ch08_cuda_graphs.scene import DEVICE

NOBODY = 5  # the last of six rows


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, device=DEVICE)


@pytest.fixture
def rows():
    """Tokens and lengths of six rows."""
    return ints(10, 11, 12, 13, 14, 15), ints(1, 2, 3, 4, 5, 0)


def test_tokens_and_lengths_are_kept_by_row_and_not_by_place(rows):
    tokens, lengths = rows

    keep_tokens(ints(61, 62), ints(4, 1), ints(6, 3), tokens, lengths)

    assert tokens.tolist() == [10, 62, 12, 13, 61, 15], "row rows[i] holds chosen[i], in the very tensor that was given"
    assert lengths.tolist() == [1, 3, 3, 4, 6, 0], "row rows[i] holds kv_lens[i], in the very tensor that was given"


def test_nobody_never_grows(rows):
    """Its position is looked up in its page table in each step, for as long as the engine runs."""
    tokens, lengths = rows
    for _ in range(3):
        keep_tokens(ints(61, 62, 63), ints(2, NOBODY, NOBODY), ints(4, 1, 1), tokens, lengths)
    assert lengths.tolist() == [1, 2, 4, 4, 5, 0], "the last row is nobody's: its length stays 0"


def test_a_row_without_a_valid_token_feeds_one_that_can_be_looked_up(rows):
    tokens, lengths = rows
    keep_tokens(ints(-1, 62), ints(3, 0), ints(5, 2), tokens, lengths)  # NaN: the host will end this request
    assert tokens[[3, 0]].tolist() == [0, 62], "-1 is kept as 0: the embedding has no row -1"


def test_what_was_chosen_stays_as_it_is(rows):
    """The host has yet to read it, -1 included."""
    chosen = ints(-1, 62)
    keep_tokens(chosen, ints(3, 0), ints(5, 2), *rows)
    assert chosen.tolist() == [-1, 62], "the host reads `chosen`: clamp a copy"


def test_the_next_step_begins_where_this_one_ended(rows):
    tokens, lengths = rows
    tables, seeds = torch.zeros(6, 8, dtype=torch.int64, device=DEVICE), ints(*range(6))
    order, temperatures = ints(4, 1, NOBODY), torch.zeros(6, dtype=torch.float64, device=DEVICE)

    def a_step():
        """A model that answers with the token and the position before, as one graph."""
        ids, positions, _, kv_lens, *_ = decode_rows(order, tables, 4, tokens, lengths, seeds, temperatures)
        chosen = ids * 2 + positions
        keep_tokens(chosen, order, kv_lens, tokens, lengths)
        return chosen

    expected = [(14, 5), (11, 2)]
    a_step()  # as the warm-up of a capture
    graph = new_graph(DEVICE)
    chosen = graph.capture(a_step)
    for replay in range(4):
        expected = [(2 * token + length, length + 1) for token, length in expected]
        assert list(zip(tokens[[4, 1]].tolist(), lengths[[4, 1]].tolist(), strict=True)) == expected, (
            f"after {replay} replays; a new tensor in place of the old one is seen by no graph"
        )
        graph.replay()
        assert chosen[:2].tolist() == [2 * token + length for token, length in expected]
