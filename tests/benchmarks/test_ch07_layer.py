"""Kernels and bytes of a layer: what is counted on the meta device against hand counts."""

from __future__ import annotations

import pytest
import torch
from minisgl_kernels import reference

from benchmarks import ch07_layer
from benchmarks.record import load
from minisgl.models.config import ModelConfig

T = 64


def count(run, *shapes):
    """Rows of what `run` does with meta tensors of these shapes in bf16."""
    counted = ch07_layer.Count()
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    with torch.inference_mode(), ch07_layer.Watch(counted):
        run(*tensors)
    return counted.rows


def test_a_view_is_no_kernel_and_each_operation_is_one():
    assert count(lambda x: x.view(2, -1).chunk(2, dim=1), (4, 8)) == []

    [copy, add] = count(lambda x, y: (x.float(), x + y), (4, 8), (8,))
    assert (copy["kernels"], copy["read"], copy["written"]) == (1, 64, 128)
    assert (add["kernels"], add["read"], add["written"]) == (1, 64 + 16, 64)


def test_a_norm_in_torch_is_eight_kernels():
    rows = count(lambda x, w: reference.rms_norm(x, w, 1e-6), (T, 16), (16,))

    assert sum(row["kernels"] for row in rows) == 8


def test_silu_times_up_in_torch_counted_by_hand():
    silu, times = count(reference.silu_and_mul, (T, 32))

    half = T * 16 * 2
    assert (silu["read"], silu["written"]) == (half, half)
    assert (times["read"], times["written"]) == (2 * half, half)


@pytest.mark.parametrize("fused", [False, True])
def test_products_and_attention_are_the_same_in_both(fused):
    config = ModelConfig.from_folder(ch07_layer.MODEL)
    rows = {row["op"]: row for row in ch07_layer.layer(config, T, 1024, fused)}

    weight = 2 * 4096 * 1024
    assert rows["qkv_proj"] == {
        "op": "qkv_proj", "kernels": 1, "read": 2 * T * 1024 + weight, "written": 2 * T * 4096,
    }  # fmt: skip
    assert rows["attention"]["read"] == 2 * T * 2048 + 1024 * 4096


def test_a_fused_layer_is_nine_kernels():
    config = ModelConfig.from_folder(ch07_layer.MODEL)

    rows = ch07_layer.layer(config, T, 1024, fused=True)
    assert ch07_layer.totals(rows)["kernels"] == 9
    assert ch07_layer.totals(rows)["kernels_between"] == 4


def test_the_recorded_kernel_is_what_the_generator_writes():
    assert load("ch07_layer")["data"]["generated"] == ch07_layer.generated()
