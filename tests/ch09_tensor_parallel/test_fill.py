"""Task 09.3: a shard is copied to where it is held, and nothing else is read."""

from __future__ import annotations

import pytest
import torch

from minisgl.layers.shard import Shard
from tests.ch09_tensor_parallel.scene import OnDisk, counted

NAN = float("nan")


def filled(shard: Shard, full: torch.Tensor, *shape: int) -> torch.Tensor:
    held = torch.full(shape, NAN)
    shard.fill(held, full)
    return held


def test_rows():
    full = counted(6, 4)
    assert torch.equal(filled(Shard(6, ((2, 5),)), full, 3, 4), full[2:5])


def test_columns():
    full = counted(4, 6)
    assert torch.equal(filled(Shard(6, ((2, 5),), dim=1), full, 4, 3), full[:, 2:5])


def test_a_bias_has_one_dimension():
    full = counted(6)
    assert torch.equal(filled(Shard(6, ((3, 6),)), full, 3), full[3:])


@pytest.mark.parametrize("dim", [0, 1])
def test_several_ranges_lie_behind_one_another_in_their_order(dim):
    full = counted(8, 8)
    shape = (5, 8) if dim == 0 else (8, 5)

    held = filled(Shard(8, ((6, 8), (1, 2), (6, 8)), dim), full, *shape)

    assert torch.equal(held, full.index_select(dim, torch.tensor([6, 7, 1, 6, 7])))


@pytest.mark.parametrize("dim", [0, 1])
def test_what_is_left_of_the_place_is_zero(dim):
    full = counted(5, 5)
    held = filled(Shard(5, ((3, 5),), dim), full, *((4, 5) if dim == 0 else (5, 4)))

    assert torch.equal(held.narrow(dim, 0, 2), full.narrow(dim, 3, 2))
    assert torch.equal(held.narrow(dim, 2, 2), torch.zeros_like(held.narrow(dim, 2, 2))), "padding is not zero"


def test_an_empty_range_leaves_zeros_alone():
    assert torch.equal(filled(Shard(5, ((5, 5),)), counted(5, 3), 2, 3), torch.zeros(2, 3))


def test_what_is_held_may_be_a_part_of_a_larger_weight():
    """Query, key and value projections are stacked: each has some rows of one tensor."""
    full, stack = counted(6, 4), torch.full((8, 4), NAN)

    Shard(6, ((0, 3),)).fill(stack[2:5], full)

    assert torch.equal(stack[2:5], full[:3])
    assert stack[:2].isnan().all(), "rows of another projection are overwritten"
    assert stack[5:].isnan().all(), "rows of another projection are overwritten"


def test_numbers_take_the_dtype_of_the_place():
    held = torch.zeros(2, 3, dtype=torch.bfloat16)
    Shard(4, ((1, 3),)).fill(held, counted(4, 3))
    assert held.tolist() == [[4, 5, 6], [7, 8, 9]]


def test_the_checkpoint_stays_as_it_was():
    full = counted(6, 4)
    filled(Shard(6, ((0, 2),)), full, 4, 4)
    assert torch.equal(full, counted(6, 4))


@pytest.mark.parametrize("ranges", [((2, 4),), ((0, 1), (5, 8)), ((8, 8),)])
@pytest.mark.parametrize("dim", [0, 1])
def test_the_rest_of_the_file_is_not_read(dim, ranges, monkeypatch):
    monkeypatch.setattr(OnDisk, "read", 0)
    shard = Shard(8, ranges, dim)
    shape = (shard.size + 1, 8) if dim == 0 else (8, shard.size + 1)

    filled(shard, counted(8, 8).as_subclass(OnDisk), *shape)

    assert OnDisk.read == 8 * shard.size, f"{OnDisk.read} of 64 numbers were read, where {8 * shard.size} are held"
