"""Linear layers, alone or several stacked into one matrix product."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]  # (x, W, b) → x Wᵀ + b


class Linear(nn.Module):
    """y = x Wᵀ + b, with W [out_features, in_features] as in the checkpoint."""

    product: Product = staticmethod(F.linear)  # models.register.build_model may put another in its place

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.weight, self.bias)


class MergedLinear(Linear):
    """Several projections of the same input, stacked by output row so that the input is read once.

    Args:
        in_features: width of the input.
        parts: checkpoint name of each projection and its output width, in the order of the stack.
    """

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool = False) -> None:
        super().__init__(in_features, sum(parts.values()), bias)
        self.parts = parts
