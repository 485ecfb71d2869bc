"""Task 09.7: all ranks' tensors, one behind the other along the last dimension.

The ranks are threads that meet over gloo, as processes would.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from minisgl.distributed.comm import connect


def gathered(*ranks: torch.Tensor) -> list[torch.Tensor]:
    """What each rank gets, when they come with these."""
    store: Any = torch.distributed.HashStore()

    def run(rank: int) -> torch.Tensor:
        comm = connect(store, rank, len(ranks), "gloo", timeout_s=20)
        result = comm.all_gather(ranks[rank])
        comm.minimum(0)  # a rank that leaves first would take its connections along
        return result

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, range(len(ranks))))


def check(*ranks: torch.Tensor) -> None:
    expected = torch.cat(ranks, dim=-1)
    for rank, result in enumerate(gathered(*ranks)):
        assert result.shape == expected.shape, f"rank {rank} has {list(result.shape)} for {list(expected.shape)}"
        assert result.dtype == expected.dtype
        assert torch.equal(result, expected), f"rank {rank} has\n{result}\nin place of\n{expected}"


def numbered(rank: int, *shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + 1000 * rank


@pytest.mark.parametrize("size", [2, 3])
def test_rows_of_logits_grow_in_the_order_of_ranks(size):
    check(*(numbered(rank, 4, 5) for rank in range(size)))


def test_two_ranks_of_two_columns():
    for result in gathered(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 6], [7, 8]])):
        assert result.tolist() == [[1, 2, 5, 6], [3, 4, 7, 8]]


@pytest.mark.parametrize("shape", [(6,), (1, 6), (6, 1), (2, 3, 4), (2, 1, 3, 2)], ids=str)
def test_any_number_of_dimensions(shape):
    check(*(numbered(rank, *shape) for rank in range(3)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64])
def test_any_dtype(dtype):
    check(*((torch.arange(6).view(2, 3) + 10 * rank).to(dtype) for rank in range(2)))


def test_a_view_with_gaps():
    check(*(numbered(rank, 4, 6)[:, ::2] for rank in range(2)))


def test_a_transposed_view():
    check(*(numbered(rank, 4, 3).T for rank in range(2)))


def test_a_step_without_rows():
    check(*(numbered(rank, 0, 5) for rank in range(2)))


def test_what_a_rank_brings_stays_as_it_was():
    ranks = [numbered(rank, 2, 3) for rank in range(2)]
    gathered(*ranks)
    assert all(torch.equal(mine, numbered(rank, 2, 3)) for rank, mine in enumerate(ranks))
