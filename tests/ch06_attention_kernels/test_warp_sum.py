"""Task 06.5: `warp_sum` adds up runs of lanes by shuffles, and every lane of a run gets the sum."""

from __future__ import annotations

import pytest
import torch
from minisgl_kernels import cuda
from minisgl_kernels.cuda import driver

from tests.ch06_attention_kernels import cuda_case
from tests.ch06_attention_kernels.harness import Scene, device

cuda_case.require()


def sums(x: torch.Tensor, run: int, monkeypatch, seed: int = 0) -> torch.Tensor:
    """What each thread gets from warp_sum<run>."""
    x, out = x.to(device()), torch.full_like(x, torch.nan, device=device())
    args = driver.Args(q=x.data_ptr(), out=out.data_ptr())
    macros = {"DTYPE": "float", "GROUP": 1, "HEAD_DIM": 64, "RUN": run}
    cuda_case.launch("probe", macros, args, monkeypatch, seed)
    return out.cpu()


@pytest.mark.parametrize("run", [32, 16, 8, 4, 2])
def test_every_lane_gets_the_sum_of_its_run(run, monkeypatch):
    x = torch.randint(-1000, 1000, (cuda.THREADS,)).float()  # of whole numbers, every order gives the same sum

    expected = x.view(-1, run).sum(1, keepdim=True).expand(-1, run).flatten()

    out = sums(x, run, monkeypatch)

    for thread in (out != expected).nonzero().flatten().tolist()[:1]:
        lane = thread % 32
        first = lane - lane % run
        of_run = f"lanes {first} … {first + run - 1} sum to {expected[thread]:.0f}"
        pytest.fail(f"lane {lane} got {out[thread]:.0f}; {of_run}", pytrace=False)


def test_a_run_of_one_lane_is_its_own_sum(monkeypatch):
    x = torch.randn(cuda.THREADS)

    assert torch.equal(sums(x, 1, monkeypatch), x)


def test_every_number_counts_once(monkeypatch):
    """Powers of two: a sum tells by its bits which lanes are in it, and one that came twice shows one bit higher."""
    x = torch.zeros(cuda.THREADS)
    x[:16] = 2.0 ** torch.arange(16)

    out = sums(x, 16, monkeypatch)

    assert [int(n) for n in out[:16]] == [2**16 - 1] * 16
    assert torch.equal(out[16:], torch.zeros(cuda.THREADS - 16)), "a run took numbers of its neighbour"


@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_in_which_lanes_run_does_not_matter(seed, monkeypatch):
    x = torch.randn(cuda.THREADS)

    assert torch.equal(sums(x, 32, monkeypatch, seed), sums(x, 32, monkeypatch))


@pytest.mark.parametrize("step", [3, 4, 6])
def test_the_steps_of_the_ladder_that_use_it_give_the_answer(step):
    scene = Scene([37, 5], page_size=16, head_dim=64)

    with cuda_case.only_the_compilers_words():
        out = cuda.paged_decode(*scene.arguments(), scene.blank(), step=step)

    scene.check(out)


def test_it_compiles_for_a_gpu():
    cuda_case.compile_source("decode_3_warps.cu", "sm_80", {"DTYPE": "f16", "GROUP": 2, "HEAD_DIM": 64})
