"""Task 07.3: `silu_and_mul_kernel` reads gate and up once and writes silu(gate) · up."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from minisgl_kernels.triton.activation import silu_and_mul

from tests.ch07_fused_ops.scene import DEVICE, check, compiles, interpreted, random, rows_apart
from tests.tolerances import FUSED


def exact(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up


def test_the_row_of_the_page(dtype):
    gate_up = torch.tensor([[0.0, 1.0, 5.0, 10.0]], device=DEVICE).to(dtype)  # gate (0, 1), up (5, 10)

    out = silu_and_mul(gate_up)

    expected = torch.tensor([[0.0, 7.31058578630005]], device=DEVICE, dtype=torch.float64)
    check(FUSED[dtype], out, expected, "silu(1) = 1 / (1 + e⁻¹) = 0.731, times 10; silu(0) = 0")


@pytest.mark.parametrize("width", [1, 33, 1024, 2100])
@pytest.mark.parametrize("tokens", [1, 5])
def test_the_first_half_gates_the_second(tokens, width, dtype):
    gate_up = rows_apart(3 * random(tokens, 2 * width, dtype=dtype))

    out = silu_and_mul(gate_up)

    assert not out.isnan().any(), "an element is NaN: it was not written, or what lies beyond the row was read"
    check(FUSED[dtype], out, exact(gate_up), "out[t, i] = silu(gate_up[t, i]) · gate_up[t, WIDTH + i]")


@pytest.mark.filterwarnings("ignore:overflow")  # of the interpreter's exp, as meant
def test_the_exponential_is_taken_in_fp32(dtype):
    gate = torch.tensor([[-1000.0, -15.0, -12.0, 12.0, 1000.0]], device=DEVICE)
    gate_up = torch.cat([gate, torch.ones_like(gate)], dim=1).to(dtype)

    check(FUSED[dtype], silu_and_mul(gate_up), exact(gate_up), "e¹² is beyond fp16: compute in fp32, round at the end")


def test_silu_is_rounded_before_it_meets_up():
    """silu(2.234375) is 2.01830, of which fp16 keeps 2.01758: times 1.6875 that is another number in fp16."""
    gate_up = torch.tensor([[2.234375, 1.6875]], device=DEVICE).half()

    assert silu_and_mul(gate_up).item() == 3.404296875, "round silu to the dtype of gate, then multiply by up"


@interpreted
def test_each_byte_is_moved_once():
    from minisgl_kernels.triton.score import count_bytes

    gate_up = random(5, 2 * 1100)
    with count_bytes() as moved:
        out = silu_and_mul(gate_up)

    assert moved.read == gate_up.nbytes, f"{moved.read:,} bytes read of {gate_up.nbytes:,}: load gate and up once"
    assert moved.written == out.nbytes, f"{moved.written:,} bytes written of {out.nbytes:,}: a tile is one program's"


@pytest.mark.slow
def test_it_compiles_for_an_h100():
    compiles("silu_and_mul_kernel[fp16 WIDTH=1536", "sm_90")
