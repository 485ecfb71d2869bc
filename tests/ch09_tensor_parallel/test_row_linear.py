"""Task 09.4: each rank multiplies what it has, and one all-reduce adds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl.distributed.comm import ALONE, Unsummed
from minisgl.layers.linear import RowLinear
from tests.ch09_tensor_parallel.scene import filled
from tests.distributed.group import in_threads

SIZES = [2, 3, 4]
IN, OUT = 24, 5


def whole_numbers(*shape: int) -> torch.Tensor:
    """Small ones, whose sums are exact in any order."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(sum(shape))).float()


WEIGHT, X, BIAS = whole_numbers(OUT, IN), whole_numbers(7, IN), torch.tensor([0.5, -3.0, 7.0, 1.0, 100.0])


def layer(comm: Any, bias: bool = False) -> RowLinear:
    made = filled(RowLinear(IN, OUT, bias, comm), WEIGHT)
    if bias:
        made.bias.copy_(BIAS)
    return made


def mine(comm: Any) -> torch.Tensor:
    return X.chunk(comm.size, dim=1)[comm.rank]


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_has_the_product_of_the_whole_layer(size):
    for result in in_threads(size, lambda comm: layer(comm)(mine(comm))):
        assert torch.equal(result, X @ WEIGHT.T)


@pytest.mark.parametrize("size", SIZES)
def test_a_bias_is_added_once(size):
    for rank, result in enumerate(in_threads(size, lambda comm: layer(comm, bias=True)(mine(comm)))):
        times = (result - X @ WEIGHT.T)[0] / BIAS
        assert torch.equal(result, X @ WEIGHT.T + BIAS), f"rank {rank} of {size} has the bias {times.tolist()} times"


@pytest.mark.parametrize("size", SIZES)
def test_the_bias_is_in_the_parts_also_where_the_sum_is_taken_later(size):
    """With --custom-all-reduce the layer's all_reduce returns what it got, and the norm behind it sums."""

    def summed_later(comm):
        part = layer(Unsummed(comm), bias=True)(mine(comm))
        return comm.all_reduce(part)

    for rank, result in enumerate(in_threads(size, summed_later)):
        times = (result - X @ WEIGHT.T)[0] / BIAS
        assert torch.equal(result, X @ WEIGHT.T + BIAS), (
            f"rank {rank} of {size} has the bias {times.tolist()} times: one rank adds it, to its part, before the sum"
        )


def test_one_process_is_a_group_too():
    assert torch.equal(layer(ALONE, bias=True)(X), X @ WEIGHT.T + BIAS)


@pytest.mark.parametrize("bias", [False, True])
def test_the_ranks_meet_once(bias):
    def calls(comm):
        layer(comm, bias)(mine(comm))
        return comm.calls

    assert in_threads(3, calls) == [{"all_reduce": 1}] * 3


def test_the_input_is_not_changed():
    def after(comm):
        x = mine(comm).clone()
        layer(comm)(x)
        return torch.equal(x, mine(comm))

    assert in_threads(2, after) == [True, True]


def test_products_are_the_business_of_the_chosen_ops():
    class Ops:
        @staticmethod
        def linear(x, weight, bias=None):
            return torch.full((len(x), len(weight)), 10.0)

    def run(comm):
        made = layer(comm)
        made.ops = Ops
        return made(mine(comm))

    assert all(torch.equal(result, torch.full((7, OUT), 20.0)) for result in in_threads(2, run))
