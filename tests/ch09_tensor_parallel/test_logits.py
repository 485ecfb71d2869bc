"""Task 09.6: logits of the whole vocabulary on every rank, without its padding."""

from __future__ import annotations

import pytest
import torch

from minisgl.distributed.comm import ALONE
from minisgl.layers.embedding import Embedding
from tests.ch09_tensor_parallel.scene import EqualShapes, filled
from tests.distributed.group import in_threads

SIZES = [2, 3, 4]


def whole_numbers(*shape: int) -> torch.Tensor:
    """Small ones, whose sums are exact in any order."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(sum(shape))).float()


HIDDEN = whole_numbers(3, 6)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("vocab", [5, 12, 101])
def test_every_rank_has_the_logits_of_one_process(vocab, size):
    table = whole_numbers(vocab, 6)
    results = in_threads(size, lambda comm: filled(Embedding(vocab, 6, comm), table).logits(HIDDEN))

    for result in results:
        assert result.shape == (3, vocab), f"{result.shape[1]} logits a row for {vocab} tokens"
        assert torch.equal(result, HIDDEN @ table.T)


@pytest.mark.parametrize("vocab", [5, 9, 101])
def test_padding_is_never_chosen(vocab):
    """All logits are -3. A padding row is zeros, so its logit would be the largest."""
    table, hidden = -torch.ones(vocab, 3), torch.ones(2, 3)
    results = in_threads(4, lambda comm: filled(Embedding(vocab, 3, comm), table).logits(hidden))

    assert all((result == -3).all() for result in results)
    assert all(int(result.argmax(-1).max()) < vocab for result in results)


@pytest.mark.parametrize("vocab", [5, 101])
def test_all_ranks_come_to_the_gather_with_the_same_shape(vocab):
    table = whole_numbers(vocab, 6)
    results = in_threads(4, lambda comm: filled(Embedding(vocab, 6, EqualShapes(comm)), table).logits(HIDDEN))
    assert all(torch.equal(result, HIDDEN @ table.T) for result in results)


def test_the_ranks_meet_once():
    def calls(comm):
        filled(Embedding(9, 6, comm), whole_numbers(9, 6)).logits(HIDDEN)
        return comm.calls

    assert in_threads(2, calls) == [{"all_gather": 1}] * 2


def test_one_process_is_a_group_too():
    table = whole_numbers(9, 6)
    assert torch.equal(filled(Embedding(9, 6, ALONE), table).logits(HIDDEN), HIDDEN @ table.T)
