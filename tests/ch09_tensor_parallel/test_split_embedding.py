"""Task 09.5: each rank looks up the tokens that it holds, and the sum has all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl.layers.embedding import SplitEmbedding
from tests.ch09_tensor_parallel.scene import filled
from tests.distributed.group import in_threads


def look_up(comm: Any, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return filled(SplitEmbedding(*table.shape, comm), table)(ids)


def table_of(vocab: int) -> torch.Tensor:
    return torch.randn(vocab, 6, generator=torch.Generator().manual_seed(vocab))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("vocab", [5, 8, 12, 101])
def test_every_token_has_its_row_on_every_rank(vocab, size):
    table, ids = table_of(vocab), torch.arange(vocab).flip(0)
    for result in in_threads(size, look_up, table, ids):
        wrong = [int(id) for id, row in zip(ids, result, strict=True) if not torch.equal(row, table[id])]
        assert not wrong, f"tokens {wrong} of {vocab}, over {size} ranks, have other rows"


def test_a_token_may_come_often():
    table, ids = table_of(8), torch.tensor([3, 3, 4, 0, 3, 7, 4])
    assert all(torch.equal(result, table[ids]) for result in in_threads(2, look_up, table, ids))


def test_the_tokens_may_all_lie_on_one_rank():
    table, ids = table_of(8), torch.tensor([6, 5, 7])
    assert all(torch.equal(result, table[ids]) for result in in_threads(4, look_up, table, ids))


@pytest.mark.parametrize("row", range(8))
def test_a_row_that_stands_in_for_tokens_of_others_adds_nothing(row):
    """Zero times infinity is NaN: what a rank has looked up for the others' tokens is replaced, not multiplied."""
    table = torch.ones(8, 6)
    table[row] = float("inf")
    ids = torch.tensor([i for i in range(8) if i != row])

    for result in in_threads(2, look_up, table, ids):
        assert torch.equal(result, torch.ones(7, 6)), f"row {row} is in the sum for tokens that are not its"


def test_the_ranks_meet_once():
    def calls(comm):
        look_up(comm, table_of(8), torch.tensor([0, 7]))
        return comm.calls

    assert in_threads(2, calls) == [{"all_reduce": 1}] * 2


def test_the_ids_are_not_changed():
    ids = torch.tensor([0, 5, 7])
    in_threads(2, look_up, table_of(8), ids)
    assert ids.tolist() == [0, 5, 7], "the step's own ids were shifted"


def test_nothing_waits_for_the_host():
    """A mask keeps its shape whatever it holds, so that a CUDA graph can have it."""
    meta = torch.empty(7, dtype=torch.int64, device="meta")

    def run(comm):
        return SplitEmbedding(8, 6, comm).to("meta")(meta).shape

    assert in_threads(2, run) == [(7, 6)] * 2
