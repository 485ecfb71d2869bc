"""The small dataclasses that travel through the engine.

Imports no torch: whatever plans work in plain integers can use this file in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the next token and when to stop. Frozen, so that one object can serve many requests.

    Args:
        max_tokens: at most this many new tokens, ≥ 1.
        temperature: 0 is greedy; 1 samples from the model's own distribution; ≥ 0.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the fewest tokens whose probabilities sum to at least this, in (0, 1] (Holtzman et al., 2020).
        min_p: drop tokens less probable than this fraction of the most probable one, in [0, 1].
        seed: same seed, same tokens; None draws a fresh one.
        ignore_eos: go on past end-of-sequence tokens, for benchmarks.

    Raises:
        ValueError: a value out of range, naming the field.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _require(0 <= self.temperature < float("inf"), "temperature", self.temperature, "0 or more, and finite")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        _require(self.seed is None or 0 <= self.seed < 2**63, "seed", self.seed, "between 0 and 2**63 - 1")


def _require(holds: bool, field: str, value: object, expected: str) -> None:
    if not holds:
        raise ValueError(f"{field} is {value}, but must be {expected}")


@dataclass
class WorkCounts:
    """What the engine did, counted rather than timed: the same on every machine."""

    steps: int = 0
    tokens_computed: int = 0  # token rows that went through the decoder
    kv_bytes_read: int = 0  # from the KV cache, all layers
    kv_bytes_written: int = 0


class AttentionBackend(Protocol):
    """Where a layer's K and V come from, and how queries attend over them."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, batch: ForwardBatch
    ) -> torch.Tensor:
        """Attend with this step's q [T, heads, head_dim], k and v [T, kv_heads, head_dim]; returns q's shape."""
        ...


@dataclass
class ForwardBatch:
    """One step as the layers see it: T tokens in a row, and what they attend to."""

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, the place of each token in its sequence
    attention: AttentionBackend
    output_rows: torch.Tensor | None = None  # [R] rows whose logits are wanted; None for all
