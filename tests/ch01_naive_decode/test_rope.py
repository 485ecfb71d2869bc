"""01.2 apply_rope."""

from __future__ import annotations

import math

import minisgl_kernels.reference as ops
import pytest
import torch


def angles_of(positions: torch.Tensor, head_dim: int, theta: float = 100.0) -> torch.Tensor:
    inv_freq = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return positions.double().unsqueeze(1) * inv_freq  # [T, head_dim / 2]


def rope(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    angles = angles_of(positions, x.shape[-1])
    return ops.apply_rope(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype))


def by_complex_numbers(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A pair (a, b) is the number a + bi, and turning it is multiplying by cos + i·sin."""
    half = x.shape[-1] // 2
    turned = torch.complex(x.double()[..., :half], x.double()[..., half:])
    turned = turned * torch.polar(torch.ones(()).double(), angles_of(positions, 2 * half)).unsqueeze(1)
    return torch.cat([turned.real, turned.imag], dim=-1)


def test_the_worked_example_of_the_page():
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])  # one token, one head: pairs (1, 3) and (2, 4)
    quarter, half_turn = math.pi / 2, math.pi
    angles = torch.tensor([[quarter, half_turn]])

    y = ops.apply_rope(x, angles.cos(), angles.sin())

    torch.testing.assert_close(
        y,
        torch.tensor([[[-3.0, -2.0, 1.0, -4.0]]]),
        rtol=0,
        atol=1e-6,
        msg=f"a quarter turn makes (1, 3) a (-3, 1), half a turn (2, 4) a (-2, -4): got {y.flatten().tolist()}",
    )


@pytest.mark.parametrize("shape", [(1, 1, 2), (7, 3, 10), (4, 4, 8), (3, 9, 64)], ids=str)
def test_element_i_turns_with_element_i_plus_half_by_the_angle_of_its_token(shape: tuple[int, int, int]):
    torch.manual_seed(0)
    x = torch.randn(shape)
    positions = torch.randperm(50)[: shape[0]]  # in no order: the angle comes from cos and sin, not from the row number
    expected = by_complex_numbers(x, positions)

    y = rope(x, positions)

    torch.testing.assert_close(
        y.double(),
        expected,
        rtol=1e-5,
        atol=1e-5,
        msg=lambda m: f"pair i is (x[i], x[i + head_dim / 2]), turned counter-clockwise by its token's angle\n{m}",
    )


def test_neighbouring_elements_are_not_a_pair():
    x = torch.zeros(1, 1, 8)
    x[0, 0, 0] = 1.0

    y = rope(x, torch.tensor([3]))

    touched = y[0, 0].nonzero().flatten().tolist()
    assert touched == [0, 4], f"element 0 turns into element 4 here (half-split layout), but it reached {touched}"


def test_position_0_is_not_turned():
    x = torch.randn(1, 3, 6)
    before = x.clone()

    y = rope(x, torch.tensor([0]))

    torch.testing.assert_close(y, before, msg="cos 0 is 1 and sin 0 is 0, so nothing may change at position 0")


def test_turning_keeps_the_length_of_every_pair():
    torch.manual_seed(0)
    x = torch.randn(5, 3, 10)
    before = x[..., :5] ** 2 + x[..., 5:] ** 2

    y = rope(x, torch.arange(11, 16))

    after = y[..., :5] ** 2 + y[..., 5:] ** 2
    torch.testing.assert_close(after, before, msg=lambda m: f"a pair became longer or shorter: check the signs\n{m}")


def test_a_score_depends_only_on_the_distance_between_query_and_key():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 32).unbind()

    def score(query_position: int, key_position: int) -> torch.Tensor:
        return (rope(q.clone(), torch.tensor([query_position])) * rope(k.clone(), torch.tensor([key_position]))).sum()

    torch.testing.assert_close(
        score(23, 18), score(8, 3), rtol=1e-4, atol=1e-4, msg=lambda m: f"both pairs are 5 tokens apart\n{m}"
    )
    assert abs(score(23, 18) - score(23, 19)) > 1e-2, "another distance must give another score"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_heads_stay_16_bit(dtype: torch.dtype):
    torch.manual_seed(0)
    x, positions = torch.randn(5, 3, 16).to(dtype), torch.arange(5)
    expected = by_complex_numbers(x, positions)

    y = rope(x, positions)

    result_dtype = y.dtype
    assert result_dtype == dtype, f"heads in {dtype} came back in {result_dtype}"
    torch.testing.assert_close(
        y.double(), expected, rtol=0.03, atol=0.03, msg=lambda m: f"right dtype, but the pairs are turned wrongly\n{m}"
    )


def test_heads_may_be_a_slice_of_a_wider_row_and_are_left_alone():
    torch.manual_seed(0)
    qkv = torch.randn(5, 5, 8)
    before = qkv.clone()

    y = rope(qkv[:, 3:4], torch.arange(5))  # one head inside the merged projection

    torch.testing.assert_close(qkv, before, msg="the input was overwritten: it is a slice of what others still read")
    torch.testing.assert_close(
        y.double(),
        by_complex_numbers(before[:, 3:4], torch.arange(5)),
        rtol=1e-5,
        atol=1e-5,
        msg=lambda m: f"x is a slice of wider rows, and its pairs are turned wrongly\n{m}",
    )
