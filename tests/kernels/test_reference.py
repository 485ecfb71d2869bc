"""Reference ops against formulas in float64. Those that are tasks of a chapter are tested in its folder."""

from __future__ import annotations

import pytest
import torch
from minisgl_kernels import silu_and_mul


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_silu_and_mul_gates_with_the_first_half_and_multiplies_the_second(dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(5, 2 * 13, generator=generator).to(dtype)
    gate, up = gate_up.double()[:, :13], gate_up.double()[:, 13:]

    out = silu_and_mul(gate_up)

    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), gate / (1 + (-gate).exp()) * up, atol=tolerance, rtol=tolerance)
