"""Fixtures of this chapter: the dtypes that run here, and poisoned memory."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=[torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
def dtype(request):
    from minisgl_kernels import why_not

    if reason := why_not("triton", torch.device("cuda" if torch.cuda.is_available() else "cpu"), request.param):
        pytest.skip(reason)
    return request.param


@pytest.fixture(autouse=True)
def poisoned():
    """What an op allocates and does not write is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
