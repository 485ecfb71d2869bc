"""The engine's numerical ops. `reference` holds each in plain torch: the oracle, and what a CPU runs."""

from minisgl_kernels.reference import apply_rope, causal_attention, rms_norm, sample, silu_and_mul

__all__ = ["apply_rope", "causal_attention", "rms_norm", "sample", "silu_and_mul"]
