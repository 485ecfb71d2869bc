"""Task 07.1: `add_rms_norm_kernel` adds to the residual stream and normalises the sum, each tensor moved once."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from minisgl_kernels.triton.norm import add_rms_norm

from tests.ch07_fused_ops.scene import DEVICE, check, compiles, interpreted, random, rows_apart
from tests.tolerances import FUSED

EPS = 1e-5


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight.double()


def test_the_row_of_the_page(dtype):
    x, residual = torch.tensor([[1.0, 2.0]], device=DEVICE), torch.tensor([[2.0, 2.0]], device=DEVICE)
    weight = torch.tensor([1.0, 10.0], device=DEVICE)

    normed, total = add_rms_norm(x.to(dtype), residual.to(dtype), weight.to(dtype), 1e-12)

    assert total.tolist() == [[3.0, 4.0]], "total_out must hold x + residual"
    expected = torch.tensor([[3 / 12.5**0.5, 40 / 12.5**0.5]], device=DEVICE)
    check(FUSED[dtype], normed, expected, "the mean square of (3, 4) is 12.5: divide by its root, then times (1, 10)")


@pytest.mark.parametrize(("tokens", "hidden"), [(1, 7), (3, 96), (19, 200), (2, 2500)])
def test_the_sum_is_kept_as_it_is_rounded(tokens, hidden, dtype):
    x, residual = random(tokens, hidden, dtype=dtype), random(tokens, hidden, dtype=dtype, seed=1)

    _, total = add_rms_norm(x, residual, random(hidden, dtype=dtype, seed=2), EPS)

    assert torch.equal(total, residual + x), "total_out is the residual stream of the next layer: x + residual, rounded"


@pytest.mark.parametrize(("tokens", "hidden"), [(1, 7), (3, 96), (19, 200), (2, 2500)])
def test_the_sum_is_normalised_not_one_of_its_parts(tokens, hidden, dtype):
    x, residual = random(tokens, hidden, dtype=dtype), random(tokens, hidden, dtype=dtype, seed=1)
    weight = random(hidden, dtype=dtype, seed=2)

    normed, total = add_rms_norm(x, residual, weight, EPS)

    check(FUSED[dtype], normed, exact_norm(total, weight), "the norm of the sum as it was rounded, over HIDDEN columns")


def test_rows_may_lie_apart_and_what_is_between_them_is_not_read(dtype):
    x, residual = random(5, 40, dtype=dtype), random(5, 40, dtype=dtype, seed=1)
    weight = random(40, dtype=dtype, seed=2)
    expected = add_rms_norm(x, residual, weight, EPS)

    for apart in [(rows_apart(x), residual), (x, rows_apart(residual))]:
        normed, total = add_rms_norm(*apart, weight, EPS)
        hint = "NaN stands between the rows: go on by each tensor's stride, and mask the columns in each load"
        assert not total.isnan().any(), hint
        assert not normed.isnan().any(), hint
        check(FUSED[dtype], normed, expected[0], "the same rows give the same norms wherever they lie")
        assert torch.equal(total, expected[1])


def test_squares_are_summed_in_fp32(dtype):
    x, residual = 200 * random(3, 300, dtype=dtype), 200 * random(3, 300, dtype=dtype, seed=1)  # squares reach 10⁶
    weight = random(300, dtype=dtype, seed=2)

    normed, total = add_rms_norm(x, residual, weight, EPS)

    check(FUSED[dtype], normed, exact_norm(total, weight), "fp16 ends at 65,504: go to fp32 before squaring")


def test_the_norm_is_rounded_before_it_meets_the_weight():
    """2 / √6.5 is 0.78446, of which fp16 keeps 0.78467: times 9.4375 that is another number in fp16."""
    x, residual = torch.tensor([[[1.0, 1.0]], [[1.0, 2.0]]], device=DEVICE).half()
    weight = torch.tensor([9.4375, 1.0], device=DEVICE).half()

    normed, _ = add_rms_norm(x, residual, weight, 0.0)

    assert normed[0, 0].item() == 7.40625, "round the normed row to the dtype of x, then multiply by the weight"


def test_eps_stands_under_the_root(dtype):
    weight = 1 + 0.1 * random(64, dtype=dtype)
    x = torch.cat([torch.zeros(1, 64, device=DEVICE), 1e-2 * random(1, 64, seed=1)]).to(dtype)

    normed, _ = add_rms_norm(x, torch.zeros_like(x), weight, 1e-3)

    assert normed[0].tolist() == [0.0] * 64, "a row of zeros stays one: eps keeps the root from being 0"
    check(FUSED[dtype], normed, exact_norm(x, weight, 1e-3), "1 / sqrt(mean(x²) + eps), with eps under the root")


def test_x_and_the_residual_stay_as_they_are(dtype):
    x, residual = random(3, 96, dtype=dtype), random(3, 96, dtype=dtype, seed=1)
    before = x.clone(), residual.clone()

    add_rms_norm(x, residual, random(96, dtype=dtype, seed=2), EPS)

    assert torch.equal(x, before[0]), "x changed: the sum goes to total_out"
    assert torch.equal(residual, before[1]), "the residual changed: the sum goes to total_out"


@interpreted
def test_each_tensor_is_moved_once():
    from minisgl_kernels.triton.score import count_bytes

    x, residual, weight = random(6, 2048), random(6, 2048, seed=1), random(2048, seed=2)

    with count_bytes() as moved:
        add_rms_norm(x, residual, weight, EPS)

    once = x.nbytes + residual.nbytes + 6 * weight.nbytes  # a program has one row here, and loads the weight for it
    assert moved.read == once, f"{moved.read:,} bytes read, {once:,} are needed: load x, residual and weight once"
    assert moved.written == 2 * x.nbytes, "store the sum and the normed row, each once"


@pytest.mark.slow
def test_it_compiles_for_a_t4_and_an_h100():
    compiles("add_rms_norm_kernel[fp16 HIDDEN=1024", "sm_75", "sm_90")
