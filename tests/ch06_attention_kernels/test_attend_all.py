"""Task 06.6: `attend_all` attends to one tile while the next is copied, in two buffers."""

from __future__ import annotations

import pytest
import torch
from minisgl_kernels import cuda
from minisgl_kernels.cuda import driver

from tests.ch06_attention_kernels import cuda_case
from tests.ch06_attention_kernels.harness import Scene

cuda_case.require()

TILE = 64  # rows in a tile, for heads of 64 numbers in fp16
SEEDS = range(4)  # each is an order of threads, and of copies that land early or late


def check(scene: Scene, why: str = "") -> None:
    __tracebackhide__ = True
    for seed in SEEDS if not cuda_case.on_gpu else [0]:
        with cuda_case.only_the_compilers_words():
            out = cuda.paged_decode(*scene.arguments(), scene.blank(), step=5, seed=seed)
        scene.check(out, why)


def test_a_sequence_that_fits_into_one_tile():
    why = (
        "a tile was read before all of it had landed: wait for your own copies, then a barrier for all others; "
        "and start a copy behind the last tile too, or the wait lets the last one through"
    )
    check(Scene([3, 1], page_size=16, head_dim=64), why)


def test_several_tiles_take_turns_in_the_two_buffers():
    why = (
        "a tile was read before all of it had landed, or overwritten while somebody still read it, or taken for "
        "another: wait for your own copies, then a barrier, then attend, then a barrier; and start a copy behind the "
        "last tile too, or the wait lets the last one through"
    )
    check(Scene([3 * TILE + 3], page_size=16, head_dim=64, dtype=torch.float16), why)


@pytest.mark.skipif(cuda_case.on_gpu, reason="only the emulator knows which copies are under way")
def test_the_next_tile_is_copied_while_this_one_is_attended_to(monkeypatch):
    """Behind the last tile comes none. Whether a round waits before or after it starts a copy is up to you."""
    tiles = 4
    scene = Scene([tiles * TILE], page_size=16, head_dim=64, kv_heads=1, group=1, dtype=torch.float16)
    q, keys, values, table, page_size, lens, starts, scale, _ = scene.arguments()
    out, counts = scene.blank(), torch.zeros(cuda.THREADS)
    args = driver.Args(
        *(x.data_ptr() for x in (q, keys, values, table, lens, starts, out, counts)), 0, q.stride(0), table.stride(0),
        *keys.stride()[:2], *values.stride()[:2], 1, page_size, 0, 1, scale,
    )  # fmt: skip

    cuda_case.launch("overlap", {"DTYPE": "f16", "GROUP": 1, "HEAD_DIM": 64}, args, monkeypatch)

    overlapped = int(counts.min())
    found = f"{tiles} tiles, {overlapped} of them attended to with a copy under way"
    assert overlapped >= tiles - 1, f"{found}: start the next tile before you attend, and do not wait for it yet"


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
