"""Task 08.2: the inputs of a decode step, from the rows on the device alone."""

from __future__ import annotations

import pytest
import torch
from minisgl_kernels.graphs import new_graph
from minisgl_kernels.reference import decode_rows

from tests.ch08_cuda_graphs.scene import DEVICE

PAGE = 4
TABLES = [[5, 9, 2], [7, 0, 0], [3, 8, 6], [0, 0, 0]]  # row 3 is nobody's
TOKENS = [50, 51, 52, 53]
LENGTHS = [6, 3, 8, 0]
SEEDS = [100, 2**62 + 1, 102, 103]
TEMPERATURES = [0.0, 0.7, 1.5, 0.0]


class Rows:
    """Four rows in memory that stays, and the order of a batch."""

    def __init__(self, *order: int) -> None:
        self.order = torch.tensor(order, device=DEVICE)
        self.tables, self.tokens, self.lengths, self.seeds = (
            torch.tensor(values, device=DEVICE) for values in (TABLES, TOKENS, LENGTHS, SEEDS)
        )
        self.temperatures = torch.tensor(TEMPERATURES, dtype=torch.float64, device=DEVICE)

    def decode(self) -> tuple[torch.Tensor, ...]:
        given = (self.tokens, self.lengths, self.seeds, self.temperatures)
        return decode_rows(self.order, self.tables, PAGE, *given)


def test_everything_comes_by_place_and_not_by_row():
    ids, _, _, _, tables, seeds, temperatures = Rows(2, 0).decode()

    assert ids.tolist() == [52, 50], "place i belongs to row order[i]"
    assert tables.tolist() == [TABLES[2], TABLES[0]], "place i belongs to row order[i]"
    assert seeds.tolist() == [102, 100], "place i belongs to row order[i]"
    assert temperatures.tolist() == [1.5, 0.0], "place i belongs to row order[i]"


def test_a_token_stands_behind_those_before_it():
    _, positions, _, kv_lens, *_ = Rows(2, 0, 1).decode()
    assert positions.tolist() == [8, 6, 3], "a row's length is how many tokens come before: the position of this one"
    assert kv_lens.tolist() == [9, 7, 4], "the sequence's length counts this token too"


@pytest.mark.parametrize(
    ("row", "length", "slot"), [(0, 0, 20), (0, 3, 23), (0, 4, 36), (0, 6, 38), (0, 8, 8), (2, 11, 27), (1, 0, 28)]
)
def test_its_slot_is_in_the_page_of_its_position(row, length, slot):
    rows = Rows(row)
    rows.lengths[row] = length

    page, place = TABLES[row][length // PAGE], length % PAGE
    why = f"position {length} is at place {place} of page {page}, which is number {length // PAGE} in the row's table"
    assert rows.decode()[2].tolist() == [slot], why


def test_nobody_writes_to_the_dummy_page():
    ids, positions, slots, kv_lens, *_ = Rows(3, 1, 3).decode()
    assert (positions.tolist(), slots.tolist(), kv_lens.tolist()) == ([0, 3, 0], [0, 31, 0], [1, 4, 1])
    assert ids.tolist() == [53, 51, 53]


def test_64_bits_stay_64_bits_and_the_temperature_is_what_sampling_takes():
    ids, positions, slots, kv_lens, tables, seeds, temperatures = Rows(1).decode()
    assert {each.dtype for each in (ids, positions, slots, kv_lens, tables, seeds)} == {torch.int64}
    assert temperatures.dtype == torch.float32, "the rows keep fp64, sampling takes fp32"
    assert seeds.item() == SEEDS[1]


def test_nothing_is_written():
    rows = Rows(2, 0)
    for each in rows.decode():
        each.fill_(1)  # neither: what comes out is not a part of the rows
    assert (rows.tokens.tolist(), rows.lengths.tolist(), rows.tables.tolist()) == (TOKENS, LENGTHS, TABLES)


def test_a_recording_follows_the_rows():
    rows = Rows(0, 3)
    graph = new_graph(DEVICE)
    graph.warm_up(rows.decode)
    recorded = graph.capture(rows.decode)

    rows.order.copy_(torch.tensor([1, 2], device=DEVICE))
    rows.lengths[2], rows.tokens[2], rows.tables[2, 2] = 9, 77, 30
    graph.replay()

    ids, positions, slots, *_ = (each.tolist() for each in recorded)
    assert (ids, positions, slots) == ([51, 77], [3, 9], [31, 121])
