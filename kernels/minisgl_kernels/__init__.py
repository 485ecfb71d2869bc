"""The engine's numerical ops. `reference` holds each in plain torch: the oracle, and what a CPU runs."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from minisgl_kernels import cpu
from minisgl_kernels.reference import apply_rope, attend, causal_attention, rms_norm, sample, silu_and_mul

__all__ = ["apply_rope", "attend", "causal_attention", "linear_for", "rms_norm", "sample", "silu_and_mul"]


def linear_for(choice: str, device: torch.device) -> Callable[..., torch.Tensor]:
    """The matrix product (x, W, b) → x Wᵀ + b of all linear layers.

    Args:
        choice: torch; cpp, our own for few rows on a CPU (see `cpu.linear`); auto, which is cpp where it runs.

    Raises:
        ValueError: cpp cannot be used here, and why.
    """
    if choice == "cpp" and (device.type != "cpu" or not cpu.available()):
        raise ValueError(f"linear cpp cannot be used on {device}: {cpu.why_unavailable() or 'it is for a CPU'}")
    return F.linear if choice == "torch" or device.type != "cpu" else cpu.linear  # which falls back to torch's
