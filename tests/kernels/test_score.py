"""The kernel score: bytes moved per useful byte, counted while Triton's interpreter runs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")
if not triton.knobs.runtime.interpret:
    pytest.skip("bytes are counted in Triton's interpreter, and here Triton compiles", allow_module_level=True)

import triton.language as tl  # noqa: E402
from minisgl_kernels.triton.score import count_bytes  # noqa: E402

BLOCK = 16


@triton.jit
def copy_kernel(x_ptr, out_ptr, n, block: tl.constexpr):
    offsets = tl.program_id(0) * block + tl.arange(0, block)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(out_ptr + offsets, x, mask=offsets < n)


@triton.jit
def shifted_kernel(x_ptr, out_ptr, n, block: tl.constexpr):
    offsets = tl.program_id(0) * block + tl.arange(0, block)
    largest = tl.max(tl.load(x_ptr + offsets, mask=offsets < n, other=float("-inf")), axis=0)
    x = tl.load(x_ptr + offsets, mask=offsets < n)  # the second time
    tl.store(out_ptr + offsets, x - largest, mask=offsets < n)


@triton.jit
def scale_kernel(x_ptr, factor_ptr, out_ptr, block: tl.constexpr):
    offsets = tl.arange(0, block)
    factor = tl.load(factor_ptr + tl.zeros_like(offsets))  # each lane asks for the same number
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets) * factor)


@triton.jit
def histogram_kernel(x_ptr, counts_ptr, block: tl.constexpr):
    tl.atomic_add(counts_ptr + tl.load(x_ptr + tl.arange(0, block)), 1)


@triton.jit
def flag_kernel(flag_ptr, out_ptr):
    tl.store(out_ptr, tl.load(flag_ptr))


@triton.jit
def fill_half_kernel(out_ptr, half, block: tl.constexpr):
    tl.store(out_ptr + half * block + tl.arange(0, block), 0.0)


@triton.jit
def failing_kernel(x_ptr):
    tl.static_assert(False, "on purpose")


def copy(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    copy_kernel[(triton.cdiv(len(x), BLOCK),)](x, out, len(x), block=BLOCK)
    return out


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.float16, 2), (torch.int64, 8)])
def test_a_copy_moves_each_byte_once(dtype, size):
    x = torch.arange(3 * BLOCK).to(dtype)

    with count_bytes() as counted:
        out = copy(x)

    assert torch.equal(out, x)
    assert (counted.read, counted.written) == (3 * BLOCK * size,) * 2
    assert (counted.read_distinct, counted.written_distinct) == (3 * BLOCK * size,) * 2
    assert counted.score == 1.0


def test_a_kernel_that_reads_its_input_twice_is_told():
    x = torch.randn(3 * BLOCK)

    with count_bytes() as counted:
        shifted_kernel[(3,)](x, torch.empty_like(x), len(x), block=BLOCK)

    assert (counted.read, counted.read_distinct) == (2 * x.nbytes, x.nbytes)
    assert counted.score == 1.5  # two reads and a write, where a read and a write would do


@pytest.mark.parametrize("n", [1, BLOCK - 1, BLOCK + 1])
def test_masked_lanes_are_not_counted(n):
    x = torch.randn(n)

    with count_bytes() as counted:
        copy(x)

    assert (counted.read, counted.written) == (4 * n, 4 * n)


def test_lanes_that_share_an_address_read_it_once():
    x, factor = torch.randn(BLOCK), torch.tensor([3.0])

    with count_bytes() as counted:
        scale_kernel[(1,)](x, factor, torch.empty_like(x), block=BLOCK)

    assert counted.read == x.nbytes + factor.nbytes


def test_atomic_operations_read_and_write():
    x = torch.arange(BLOCK, dtype=torch.int32) % 4
    counts = torch.zeros(4, dtype=torch.int32)

    with count_bytes() as counted:
        histogram_kernel[(1,)](x, counts, block=BLOCK)

    assert counts.tolist() == [4] * 4
    assert (counted.read, counted.written) == (x.nbytes + counts.nbytes, counts.nbytes)


def test_a_boolean_takes_a_byte():
    with count_bytes() as counted:
        flag_kernel[(1,)](torch.tensor([True]), torch.empty(1, dtype=torch.bool))

    assert (counted.read, counted.written) == (1, 1)


def test_parts_written_by_several_programs_and_launches_are_one_whole():
    out = torch.empty(2 * BLOCK)

    with count_bytes() as counted:
        for half in (1, 0, 1):
            fill_half_kernel[(1,)](out, half, block=BLOCK)

    assert (counted.written, counted.written_distinct) == (3 * BLOCK * 4, 2 * BLOCK * 4)


def test_a_function_of_two_kernels_is_counted_by_kernel_and_in_all():
    x = torch.randn(2 * BLOCK)

    with count_bytes() as counted:
        copied = copy(x)
        shifted_kernel[(2,)](x, torch.empty_like(x), len(x), block=BLOCK)

    assert copied.shape == x.shape
    assert list(counted.kernels) == ["copy_kernel", "shifted_kernel"]
    assert [kernel.score for kernel in counted.kernels.values()] == [1.0, 1.5]
    assert (counted.read, counted.written) == (3 * x.nbytes, 2 * x.nbytes)
    assert counted.read_distinct == x.nbytes  # the same x, three times


def test_nothing_is_counted_after_the_block_nor_after_a_failure_in_it():
    x = torch.randn(BLOCK)
    with count_bytes() as counted:
        copy(x)

    copy(x)
    with pytest.raises(Exception, match="on purpose"), count_bytes():
        failing_kernel[(1,)](x)
    copy(x)

    assert counted.read == x.nbytes


def test_counters_within_one_another_both_count():
    x = torch.randn(BLOCK)

    with count_bytes() as outer:
        copy(x)
        with count_bytes() as inner:
            copy(x)

    assert (outer.read, inner.read) == (2 * x.nbytes, x.nbytes)


def test_a_score_of_nothing_is_an_error():
    with count_bytes() as counted:
        pass

    with pytest.raises(ValueError, match="no kernel ran"):
        _ = counted.score


def test_outside_the_interpreter_it_says_what_to_set():
    code = "from minisgl_kernels.triton.score import count_bytes\nwith count_bytes(): pass"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_INTERPRET": "0"}

    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)

    assert "RuntimeError: bytes are counted in Triton's interpreter only" in done.stderr
