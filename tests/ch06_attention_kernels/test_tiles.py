"""Task 06.4: `attend_tiles` moves a tile of queries over keys, masked where a query must not see."""

from __future__ import annotations

import pytest
import torch

from tests.ch06_attention_kernels.harness import Scene
from tests.ch06_attention_kernels.triton_case import compile_kernel

triton = pytest.importorskip("triton", reason="Triton is not installed")

from minisgl_kernels.triton import attention  # noqa: E402

# Rows of a tile that stand for no query have seen nothing, and 0 / 0 is what nobody stores.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in divide")
TILE = 64  # keys in a tile for heads of 16 numbers; 32 tokens of queries for groups of 2


def check(scene: Scene, why: str = "") -> None:
    __tracebackhide__ = True
    scene.check(attention.flash_attention(*scene.arguments()), why)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_each_token_of_a_prompt_sees_itself_and_those_before_it(dtype):
    check(Scene([9], [9], dtype=dtype), "a token sees itself, and keys at `end` and beyond are not loaded")


def test_tiles_without_a_mask_are_added_to_those_with_one():
    """Keys 0 … 191 are seen by all, the rest is masked: two calls, and the second goes on from what the first left."""
    scene = Scene([3 * TILE + 20], [10], page_size=16, group=1, kv_heads=1)
    places = scene.places[0]
    scene.keys[places] *= torch.linspace(4, 0.1, len(places), device=scene.keys.device)[:, None, None]
    scene.q *= 2

    check(scene, "largest, total and acc go on from what they were given")


@pytest.mark.parametrize(("length", "new"), [(70, 2), (TILE + 1, 3), (2 * TILE, 5), (150, 40)])
def test_a_chunk_sees_the_tokens_of_earlier_chunks(length, new):
    why = "query t stands at length - new + t: that is what `asks` holds"
    check(Scene([length], [new], page_size=16), why)


def test_a_large_score_in_the_last_tile_makes_earlier_ones_smaller():
    scene = Scene([2 * TILE + 30], [4], page_size=16, group=1, kv_heads=1)
    places = scene.places[0]
    scene.keys[places] *= torch.linspace(0.1, 5, len(places), device=scene.keys.device)[:, None, None]
    scene.q *= 2

    check(scene, "go on with the largest, total and acc that softmax_step returned")


@pytest.mark.parametrize("window", [1, 5, 64, 100])
def test_with_a_window_a_token_sees_that_many_itself_among_them(window):
    check(Scene([170], [50], page_size=16, window=window), "with a window, WINDOW keys, itself among them")


def test_a_query_whose_window_begins_after_a_tile_sees_nothing_of_it():
    why = "a row that is masked altogether has seen nothing yet: no NaN"
    check(Scene([TILE + 40], [32], page_size=16, window=3), why)


@pytest.mark.parametrize("page_size", [1, 3])
def test_pages_lie_anywhere_and_have_any_size(page_size):
    check(Scene([20, 11], [7, 11], page_size=page_size), "a key lies at page · PAGE_SIZE + place in the page")


@pytest.mark.parametrize("head_dim", [24, 40])
def test_heads_whose_size_is_no_power_of_two(head_dim):
    why = "BLOCK_D columns are computed, HEAD_DIM exist: behind them lies NaN"
    check(Scene([75], [3], head_dim=head_dim, kv_heads=1, page_size=16), why)


def test_query_heads_that_share_a_kv_head_are_rows_of_one_tile():
    check(Scene([30], [12], group=3, kv_heads=2))


def test_sequences_of_any_length_share_a_launch():
    scene = Scene([90, 6, 1, 40, 33], [33, 6, 1, 2, 1], page_size=16)

    out = attention.flash_attention(*scene.arguments())

    scene.check(out, sequences=[0, 1, 3])  # those with one query are decode's


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, {"HEAD_DIM": 96, "BLOCK_D": 128, "WINDOW": 64}], ids=["128", "96 and a window"])
def test_it_compiles_for_a_gpu(sizes):
    compile_kernel(attention.__name__, "fp16", **sizes)


@pytest.mark.slow
def test_both_products_of_fp32_take_the_precision():
    rounded = compile_kernel(attention.__name__, "fp32").count("inputPrecision = tf32")

    assert not rounded, "input_precision=PRECISION: a GPU would round fp32 to 10 bits"
