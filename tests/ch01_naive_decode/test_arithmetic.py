"""The page's predictions: parameters by part, and operations of one step by formula."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.ch01_length import parameters, step_flops
from minisgl.core import WorkCounts
from minisgl.models.register import build_model
from minisgl.simple import Recompute, step
from tests.helpers import tiny_config, tiny_model


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_parts_of_the_parameter_count_are_those_of_the_model(tied: bool):
    config = tiny_config(tie_word_embeddings=tied)
    built = {name: p.numel() for name, p in build_model(config).named_parameters()}

    counted = parameters(config)

    assert counted["total"] == sum(built.values())
    for part, names in {"attention": "self_attn", "mlp": ".mlp.", "norms": "norm"}.items():
        assert counted[part] == sum(n for name, n in built.items() if names in name)


@pytest.mark.parametrize("length", [3, 7, 33])
def test_the_operations_of_a_step_are_those_that_torch_counts(length: int):
    model = tiny_model()
    counter = FlopCounterMode(display=False)

    with counter, torch.inference_mode():
        step(model, list(range(length)), 0, Recompute(), WorkCounts())

    assert counter.get_total_flops() == step_flops(model.config, length)
