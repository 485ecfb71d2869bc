"""Rotary position embedding: the angle of each position, and the scalings that stretch a model's context.

Knows nothing of queries and keys; the rotation itself is `minisgl_kernels.apply_rope`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from minisgl_kernels import reference
from torch import nn


@dataclass(frozen=True)
class RopeConfig:
    """The rope fields of a checkpoint's config, under Hugging Face's names. Fields of other rope types stay unused."""

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn


class Rotary(nn.Module):
    """Turns positions into the cosines and sines that `apply_rope` rotates by (Su et al., 2021)."""

    ops = reference

    def __init__(self, head_dim: int, config: RopeConfig) -> None:
        super().__init__()
        # An explicit device: models are built on the meta device, where a table would hold no numbers.
        exponent = torch.arange(0, head_dim, 2, device="cpu", dtype=torch.float32) / head_dim
        plain = 1.0 / config.rope_theta**exponent  # [head_dim / 2] radians per position
        inv_freq, self.magnitude = ROPE_TYPES[config.rope_type](plain, head_dim, config)
        self._inv_freq = {torch.device("cpu"): inv_freq}

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """For positions [T]: cosines and sines, each [T, head_dim / 2], computed in fp32 and then cast to dtype."""
        if positions.device not in self._inv_freq:
            self._inv_freq[positions.device] = self._inv_freq[torch.device("cpu")].to(positions.device)
        cos, sin = self.ops.rope_angles(positions, self._inv_freq[positions.device], self.magnitude, dtype)
        return cos, sin


def _default(plain: torch.Tensor, head_dim: int, config: RopeConfig) -> tuple[torch.Tensor, float]:
    return plain, 1.0


def _linear(plain: torch.Tensor, head_dim: int, config: RopeConfig) -> tuple[torch.Tensor, float]:
    """Position interpolation (Chen et al., 2023): every position counts 1 / factor."""
    return plain / config.factor, 1.0


def _llama3(plain: torch.Tensor, head_dim: int, config: RopeConfig) -> tuple[torch.Tensor, float]:
    """Llama 3.1: slow the pairs that turn few times within the original context, keep the fast ones, blend between."""
    turns = config.original_max_position_embeddings * plain / (2 * math.pi)  # within the original context
    keep = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    keep = keep.clamp(0, 1)
    return plain * keep + plain / config.factor * (1 - keep), 1.0


def _yarn(plain: torch.Tensor, head_dim: int, config: RopeConfig) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al., 2023): the same blend by turns, linear in the pair's index, and a larger magnitude."""

    def pair_that_turns(times: float) -> float:
        context = config.original_max_position_embeddings
        return head_dim * math.log(context / (times * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    first, last = pair_that_turns(config.beta_fast), pair_that_turns(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    index = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    keep = 1 - ((index - first) / (last - first or 0.001)).clamp(0, 1)
    return plain * keep + plain / config.factor * (1 - keep), _yarn_magnitude(config)


def _yarn_magnitude(config: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * weight * math.log(config.factor) + 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:  # DeepSeek's form
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale(1.0)


ROPE_TYPES: dict[str, Callable[[torch.Tensor, int, RopeConfig], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
