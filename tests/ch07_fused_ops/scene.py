"""What the tests of this chapter share: where kernels run, inputs with NaN around them, comparisons that say why."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.tolerances import Tolerance

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # on a CPU, Triton's interpreter
interpreted = pytest.mark.skipif(DEVICE.type != "cpu", reason="bytes are counted in Triton's interpreter, on a CPU")


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).to(dtype)


def rows_apart(x: torch.Tensor) -> torch.Tensor:
    """x [T, …] as a view whose rows have NaN between them, as many as a block may be too wide."""
    flat = x.flatten(1)
    wide = torch.full((len(x), 2 * flat.shape[1] + 64), torch.nan, dtype=x.dtype, device=x.device)
    wide[:, : flat.shape[1]] = flat
    return wide[:, : flat.shape[1]].unflatten(1, x.shape[1:])


def check(tolerance: Tolerance, actual: torch.Tensor, expected: torch.Tensor, hint: str) -> None:
    """Compare in fp64; a difference tells the hint first."""
    try:
        tolerance.check(actual.double(), expected.double())
    except AssertionError as error:
        raise AssertionError(f"{hint}\n{error}") from None


def compiles(kernel: str, *archs: str) -> None:
    """Compile the cases of a kernel in a process of its own, where Triton does not interpret; needs no GPU."""
    env = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "chapters.replace", "minisgl_kernels.triton.compile", "--only", kernel]
    done = subprocess.run([*command, "--arch", *archs], env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{kernel} does not compile for {', '.join(archs)}:\n{done.stdout}{done.stderr}"
