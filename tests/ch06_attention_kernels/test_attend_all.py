"""Task 06.6: `attend_all` attends to one tile while the next is copied, in two buffers."""

from __future__ import annotations

import pytest
import torch
from minisgl_kernels import cuda

from tests.ch06_attention_kernels import cuda_case
from tests.ch06_attention_kernels.harness import Scene

cuda_case.require()

TILE = 64  # rows in a tile, for heads of 64 numbers in fp16
SEEDS = range(4)  # each is an order of threads, and of copies that land early or late


def check(scene: Scene, why: str = "") -> None:
    __tracebackhide__ = True
    for seed in SEEDS if not cuda_case.on_gpu else [0]:
        scene.check(cuda.paged_decode(*scene.arguments(), scene.blank(), step=5, seed=seed), why)


def test_a_sequence_that_fits_into_one_tile():
    check(Scene([3, 1], page_size=16, head_dim=64))


def test_several_tiles_take_turns_in_the_two_buffers():
    why = (
        "a tile was read before all of it had landed, or overwritten while somebody still read it, or taken for "
        "another: wait for your own copies, then a barrier, then attend, then a barrier"
    )
    check(Scene([3 * TILE + 3], page_size=16, head_dim=64, dtype=torch.float16), why)


@pytest.mark.parametrize("length", [TILE - 1, TILE, TILE + 1, 2 * TILE])
def test_the_last_tile_may_be_full_or_not(length):
    check(Scene([length], page_size=16, head_dim=64, kv_heads=1, dtype=torch.float16))


def test_with_a_window_the_first_tile_begins_at_the_first_key_that_is_seen():
    check(
        Scene([150, 20], page_size=16, head_dim=64, window=70, dtype=torch.float16),
        "positions keys.first … keys.end - 1",
    )


def test_a_tile_of_small_rows_and_one_of_large_rows():
    check(Scene([70], page_size=3, head_dim=128, kv_heads=1, group=3))
    check(Scene([70], page_size=1, head_dim=16, kv_heads=1, group=1))


@pytest.mark.parametrize("arch", ["sm_75", "sm_80"])
def test_it_compiles_with_asynchronous_copies_and_for_a_gpu_that_has_none(arch):
    cuda_case.compile_source("decode_5_async.cu", arch, {"DTYPE": "f16", "GROUP": 2, "HEAD_DIM": 64})
