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
FUSED = {
    torch.float32: Tolerance(atol=1e-6, rtol=2e-6, why="sums of up to 16,384 squares in another order, exp2 of a GPU."),
    torch.float16: Tolerance(atol=1e-6, rtol=2**-10, why="two roundings of 2⁻¹¹; near 0 the spacing of subnormals."),
    torch.bfloat16: Tolerance(atol=1e-6, rtol=2**-7, why="two roundings of 2⁻⁸."),
}
LINEAR = {  # of results scaled to a root mean square of 1
    torch.float32: Tolerance(atol=2e-5, rtol=2e-6, why="sums of 4,096 products in another order."),
    torch.float16: Tolerance(atol=1e-4, rtol=2**-10, why="tensor cores cut off sums in fp32; one rounding of 2⁻¹¹."),
    torch.bfloat16: Tolerance(atol=1e-4, rtol=2**-8, why="the same with a rounding of 2⁻⁹."),
}
LINEAR_GATED = {
    torch.float32: Tolerance(atol=1e-4, rtol=1e-5, why="as LINEAR, times factors up to 5."),
    torch.float16: Tolerance(
        atol=1e-3,
        rtol=2**-8,
        why="gate, silu, up and their product are rounded; far below 0, silu enlarges the first.",
    ),
    torch.bfloat16: Tolerance(atol=8e-3, rtol=2**-5, why="the same with roundings eight times as large."),
}
ROTATED = {
    torch.float32: Tolerance(atol=1e-5, rtol=0, why="as FUSED, but the two products of a rotation may cancel."),
    torch.float16: Tolerance(atol=8e-3, rtol=2**-10, why="two roundings of elements up to 7 need not cancel."),
    torch.bfloat16: Tolerance(atol=6e-2, rtol=2**-7, why="the same with roundings eight times as large."),
}
GENERATED = {
    torch.float32: Tolerance(atol=2e-5, rtol=1e-5, why="sums of 256 products of size 1 in another order."),
    torch.float16: Tolerance(
        atol=3e-3,
        rtol=2**-10,
        why="each of those products has a factor rounded by 2⁻¹¹: 3e-4 on average, 2e-3 at most.",
    ),
    torch.bfloat16: Tolerance(atol=2.4e-2, rtol=2**-7, why="the same with roundings eight times as large."),
}
CUDA_DECODE = {
    torch.float32: Tolerance(
        atol=1e-5, rtol=1e-5, why="sums of up to 32,768 products in another order, exp2 of a GPU."
    ),
    torch.float16: Tolerance(atol=1e-5, rtol=2**-10, why="all sums are in fp32: the result is rounded once, by 2⁻¹¹."),
    torch.bfloat16: Tolerance(atol=1e-5, rtol=2**-8, why="the same with one rounding of 2⁻⁹."),
}
PAGED_ATTENTION = {  # of results scaled to a root mean square of 1
    torch.float32: Tolerance(atol=2e-5, rtol=1e-5, why="sums of 32,768 products in another order, exp2 of a GPU."),
    torch.float16: Tolerance(
        atol=2e-3, rtol=2**-10, why="weights rounded by 2⁻¹¹ each, times values up to 4.5; then the result's rounding."
    ),
    torch.bfloat16: Tolerance(atol=1.6e-2, rtol=2**-7, why="the same with roundings eight times as large."),
}
TILED_ATTENTION = {
    torch.float32: Tolerance(
        atol=2e-5, rtol=0, why="some 200 weights and values in another order, exp2 of a GPU: 5e-6."
    ),
    torch.float16: Tolerance(atol=4e-3, rtol=0, why="weights are rounded by 2⁻¹¹ before they meet V, results after."),
}
SAMPLE_NOISE = Tolerance(
    atol=1e-5,
    rtol=1e-6,
    why="two logarithms in fp32; that of a number near 1 is small, and its relative rounding becomes an absolute one.",
)
SAMPLE_SCORES = Tolerance(
    atol=1e-5,
    rtol=0,
    why="fp32; a sum of 2,048 terms: 5e-7 apart in powers of two. In 16 bits the sum is 1e-3 off.",
)
