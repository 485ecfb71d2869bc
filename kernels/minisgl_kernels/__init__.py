"""The engine's numerical ops. `reference` holds each in plain torch: the oracle, and what a CPU runs."""

import torch

from minisgl_kernels import cpu, reference
from minisgl_kernels.reference import apply_rope, attend, causal_attention, rms_norm, sample, silu_and_mul

__all__ = ["apply_rope", "attend", "causal_attention", "rms_norm", "sample", "silu_and_mul"]
__all__ += ["cpu", "reference", "use_cpp"]


def use_cpp(choice: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels of `cpu` are to be used in place of torch's.

    Args:
        choice: torch; cpp; auto, which is cpp where it runs.

    Raises:
        ValueError: cpp cannot be used here, and why.
    """
    fits = device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
    if choice == "cpp" and not (fits and cpu.available()):
        reason = cpu.why_unavailable() if fits else "it is for a CPU, in float32 or bfloat16"
        raise ValueError(f"cpp cannot be used on {device} in {dtype}: {reason}")
    return choice != "torch" and fits and cpu.available()
