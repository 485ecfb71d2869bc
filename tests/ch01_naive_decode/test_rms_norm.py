"""01.1 rms_norm."""

from __future__ import annotations

import math

import minisgl_kernels.reference as ops
import pytest
import torch


def by_hand(row: list[float], weight: list[float], eps: float) -> list[float]:
    mean_square = sum(value * value for value in row) / len(row)
    return [value / math.sqrt(mean_square + eps) * w for value, w in zip(row, weight, strict=True)]


def test_the_worked_example_of_the_page():
    y = ops.rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 10.0]), eps=0.0)

    expected = torch.tensor([[3 / 12.5**0.5, 40 / 12.5**0.5]])
    torch.testing.assert_close(y, expected, msg=f"(3, 4) is divided by √12.5: got {y.tolist()}")


@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (5, 3, 17)], ids=str)
def test_each_row_is_divided_by_its_own_root_mean_square_and_scaled_by_the_weight(shape: tuple[int, ...]):
    torch.manual_seed(0)
    x, weight = torch.randn(shape) * 3 + 1, torch.randn(shape[-1])
    rows = [by_hand(row, weight.tolist(), 1e-5) for row in x.view(-1, shape[-1]).tolist()]

    y = ops.rms_norm(x, weight, eps=1e-5)

    torch.testing.assert_close(
        y, torch.tensor(rows).view(shape), msg=lambda m: f"not x / sqrt(mean(x²) + eps) · weight, row by row\n{m}"
    )


def test_eps_is_added_under_the_root():
    row = [1e-3, -1e-3, 2e-3, -2e-3]  # mean square near eps: where it stands decides the result
    expected = torch.tensor([by_hand(row, [1.0] * 4, 1e-6)])

    y = ops.rms_norm(torch.tensor([row]), torch.ones(4), eps=1e-6)

    torch.testing.assert_close(y, expected, msg=lambda m: f"eps belongs to the mean of squares, under the root\n{m}")


@pytest.mark.parametrize("size", [300.0, 1e-4])
def test_a_half_precision_row_is_squared_in_fp32(size: float):
    torch.manual_seed(0)
    half = torch.randn(32) * size  # fp16 holds neither 300² nor (1e-4)²
    x, weight = torch.cat([half, -half]).half().unsqueeze(0), torch.randn(64).half()
    expected = torch.tensor([by_hand(x[0].tolist(), weight.tolist(), 1e-12)])

    y = ops.rms_norm(x, weight, eps=1e-12)

    torch.testing.assert_close(
        y.float(),
        expected,
        rtol=2e-3,  # two roundings to fp16
        atol=1e-6,
        msg=lambda m: f"x² left the range of fp16: convert to fp32 before squaring\n{m}",
    )


def test_the_row_is_back_in_its_dtype_before_the_weight_multiplies_it():
    x = torch.tensor([[3.0, 4.0] * 16], dtype=torch.bfloat16)  # a normalised element is 0.8485 or 1.1314
    weight = torch.linspace(0.5, 1.5, 32).to(torch.bfloat16)
    normalised = torch.tensor([[3 / 12.5**0.5, 4 / 12.5**0.5] * 16]).to(torch.bfloat16)

    y = ops.rms_norm(x, weight, eps=0.0)

    torch.testing.assert_close(
        y,
        normalised * weight,
        rtol=0,
        atol=0,
        msg=lambda m: f"not the bits of transformers: go back to the dtype of x, then multiply by the weight\n{m}",
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_result_has_the_dtype_and_shape_of_x(dtype: torch.dtype):
    x = torch.randn(3, 2, 8).to(dtype)

    y = ops.rms_norm(x, torch.ones(8, dtype=dtype), eps=1e-5)

    assert (y.dtype, y.shape) == (x.dtype, x.shape), f"x is {x.dtype} {x.shape}, the result {y.dtype} {y.shape}"


def test_rows_need_not_lie_next_to_each_other_in_memory():
    torch.manual_seed(0)
    heads = torch.randn(5, 4, 16)[:, 1:3]  # what Qwen3 hands over: two heads of a wider row
    weight = torch.randn(16)
    expected = torch.nn.functional.rms_norm(heads, [16], weight, 0.0)

    y = ops.rms_norm(heads, weight, eps=0.0)

    torch.testing.assert_close(
        y, expected, msg=lambda m: f"x is a slice of wider rows, and each row of 16 has a norm of its own\n{m}"
    )


def test_x_itself_is_left_alone():
    x = torch.randn(3, 8)
    before = x.clone()

    ops.rms_norm(x, torch.full([8], 2.0), eps=1e-5)

    torch.testing.assert_close(
        x, before, msg="x was overwritten: x.float() of an fp32 tensor is x itself, and the caller adds x back later"
    )
