"""Time on a device whose work is queued."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Seconds that run takes, the device's queue drained before and after."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
