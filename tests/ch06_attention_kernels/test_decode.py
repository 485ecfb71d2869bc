"""Task 06.3: `attend_split` moves a group of queries over one split of a sequence's keys."""

from __future__ import annotations

import math
import mmap

import pytest
import torch

from tests.ch06_attention_kernels.harness import Scene, device
from tests.ch06_attention_kernels.triton_case import compile_kernel

triton = pytest.importorskip("triton", reason="Triton is not installed")

import triton.language as tl  # noqa: E402
from minisgl_kernels.triton import decode  # noqa: E402

TILE = 32  # keys in a tile


def run(scene: Scene, splits: int, monkeypatch) -> torch.Tensor:
    monkeypatch.setattr(decode, "launch_for", lambda programs, row_bytes: (splits, TILE, 2, 2))
    return decode.paged_decode(*scene.arguments(), scene.blank())


def check(scene: Scene, monkeypatch, splits: int = 1, why: str = "") -> None:
    __tracebackhide__ = True
    scene.check(run(scene, splits, monkeypatch), why)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_query_attends_to_all_keys_of_its_sequence(dtype, monkeypatch):
    why = (
        "keys beyond the end (most of a tile for the sequence of 1) score -inf; K and V have strides of their own; "
        "scores go to softmax_step unscaled"
    )
    check(Scene([5, 1, 130], dtype=dtype), monkeypatch, why=why)


@pytest.mark.parametrize("length", [1, TILE - 1, TILE, TILE + 1, 2 * TILE + 1])
def test_the_last_tile_may_be_full_or_not(length, monkeypatch):
    why = "keys beyond the end score -inf, not 0, and what lies there (NaN) must not be loaded"
    check(Scene([length], page_size=16), monkeypatch, why=why)


def test_scores_that_rise_from_tile_to_tile(monkeypatch):
    """The largest score is in the last tile: what was summed before must shrink, weights and values alike."""
    scene = Scene([3 * TILE], group=1, kv_heads=1)
    places = scene.places[0]
    scene.keys[places] *= torch.linspace(0.1, 6, len(places), device=device())[:, None, None]
    scene.q *= 2

    check(scene, monkeypatch, why="go on with the largest, total and acc that softmax_step returned")


def test_scores_whose_exponentials_do_not_fit_an_fp32(monkeypatch):
    scene = Scene([TILE + 9, 20])
    scene.q *= 100

    scene.check(run(scene, 1, monkeypatch), atol=1e-3)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_pages_lie_anywhere_and_have_any_size(page_size, monkeypatch):
    check(Scene([37, 5], page_size=page_size), monkeypatch, why="a key lies at page · PAGE_SIZE + place in the page")


@pytest.mark.parametrize("group", [1, 3])
def test_query_heads_share_a_kv_head(group, monkeypatch):
    check(Scene([40], group=group, kv_heads=2), monkeypatch, why="a row of the query [M, D] is one head of the group")


@pytest.mark.parametrize("head_dim", [24, 40])
def test_heads_whose_size_is_no_power_of_two(head_dim, monkeypatch):
    scene = Scene([45], head_dim=head_dim, kv_heads=1)
    check(scene, monkeypatch, why="BLOCK_D columns are computed, HEAD_DIM exist: behind them lies NaN")


@pytest.mark.parametrize("splits", [2, 3, 8])
def test_splits_start_and_end_where_they_should(splits, monkeypatch):
    check(Scene([5 * TILE + 7, 3, TILE], page_size=16), monkeypatch, splits, "keys first … end - 1, no more, no fewer")


def test_with_a_window_the_first_key_is_not_the_sequences(monkeypatch):
    check(Scene([150, 10], window=33), monkeypatch, why="begin at `first`, which is not 0 here, nor a page's beginning")


@triton.jit
def probe(
    q, keys, values, table, numbers, out, first, end, scale, k_slot: tl.constexpr, v_slot: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    members, dims = tl.arange(0, 16), tl.arange(0, 16)
    query = tl.load(q + members[:, None] * 16 + dims[None, :])
    largest, total, acc = decode.attend_split(
        query, keys, values, table, first, end, scale, k_slot, v_slot, 16, 1, 16, BLOCK_N, 16, "ieee"
    )
    tl.store(numbers + members, largest)
    tl.store(numbers + 16 + members, total)
    tl.store(out + members[:, None] * 16 + dims[None, :], acc)


def attend(q, keys, values, k_slot, v_slot, slots, scale=1.0):
    """The three numbers of each row over tokens in these slots: a page table with pages of one token."""
    table = torch.as_tensor(slots, device=device())
    numbers, out = torch.full((2, 16), torch.nan, device=device()), torch.full((16, 16), torch.nan, device=device())
    probe[(1,)](q, keys, values, table, numbers, out, 0, len(slots), scale, k_slot, v_slot, BLOCK_N=16)
    return (*numbers.cpu(), out.cpu())


def test_it_returns_the_largest_score_the_sum_of_weights_and_the_weighted_sum_of_values():
    q, keys, values = torch.randn(3, 16, 16, device=device())

    largest, total, acc = attend(q, keys, values, 16, 16, range(11), scale=0.5)

    scores = 0.5 * (q @ keys[:11].T).cpu()
    weights = torch.exp2(scores - scores.amax(1, keepdim=True))  # powers of two: scale has log2(e) in it
    torch.testing.assert_close(largest, scores.amax(1), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(total, weights.sum(1), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(acc, weights @ values[:11].cpu(), atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(device() == "cuda", reason="it takes address space without memory behind it, as a CPU gives")
def test_offsets_into_the_pool_need_more_than_32_bits():
    """A pool of 2³² numbers that is described, not filled. It begins in the middle of what is mapped, so that an offset
    which overflows to below zero reads something too: zeros."""
    stride, slots, middle = 2**20, [2049, 2060, 2051], 2**32  # the middle in bytes, the rest in fp16 numbers
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        mapped = mmap.mmap(-1, 2 * middle + 2**27, flags=flags)
    except (OSError, ValueError, AttributeError) as error:
        pytest.skip(f"no 8 GB of address space: {error}")

    def numbers(slot):
        return torch.frombuffer(mapped, dtype=torch.float16, count=32, offset=middle + 2 * slot * stride)

    for slot in slots:
        numbers(slot).copy_(torch.randn(32))
    q, pool, rows = torch.randn(16, 16).half(), numbers(0), torch.stack([numbers(slot) for slot in slots])

    _, total, acc = attend(q, pool[:16], pool[16:], stride, stride, slots)

    weights = ((q.float() @ rows[:, :16].float().T) * math.log(2)).softmax(1)
    why = "slots_at gives int64: keep it until the stride is multiplied in"
    expected = weights @ rows[:, 16:].float()
    torch.testing.assert_close(acc / total[:, None], expected, atol=1e-2, rtol=1e-2, msg=lambda m: f"{why}\n{m}")


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [128, 96])
def test_it_compiles_for_a_gpu(head_dim):
    compile_kernel(decode.__name__, "fp16", HEAD_DIM=head_dim)


@pytest.mark.slow
def test_both_products_of_fp32_take_the_precision():
    rounded = compile_kernel(decode.__name__, "fp32").count("inputPrecision = tf32")

    assert not rounded, "input_precision=PRECISION: a GPU would round fp32 to 10 bits"
