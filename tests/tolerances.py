"""How close two computations of the same thing must come, in one table, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """|actual - expected| ≤ atol + rtol · |expected|, and the reason for these numbers."""

    atol: float
    rtol: float
    why: str

    def check(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(actual, expected, atol=self.atol, rtol=self.rtol)


TINY_LOGITS = Tolerance(
    atol=1e-4,
    rtol=0,
    why="fp32; logits of deviation 2, two layers of sums in another order: 2e-5 apart. A wrong term costs 0.1 or more.",
)
SMOLLM2_LOGITS = Tolerance(
    atol=5e-4,
    rtol=0,
    why="fp32; logits up to 34, thirty layers of sums in another order: 1e-4 apart.",
)
ROPE_FREQUENCIES = Tolerance(
    atol=0,
    rtol=3e-7,
    why="fp32; a scaling by no power of two has its products in another order: two units in the last place.",
)
ROPE_ANGLES = Tolerance(
    atol=1e-6,
    rtol=0,
    why="those two units, times the few turns that a slowed pair makes within 100,000 positions: 3e-7 apart.",
)
