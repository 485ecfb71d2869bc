"""Linear layers, alone or several stacked into one matrix product."""

import torch
from minisgl_kernels import reference
from torch import nn


class Linear(nn.Module):
    """y = x Wᵀ + b, with W [out_features, in_features] as in the checkpoint."""

    ops = reference  # models.register.build_model may choose another implementation of the ops

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.linear(x, self.weight, self.bias)


class MergedLinear(Linear):
    """Several projections of the same input, stacked by output row so that the input is read once.

    Args:
        in_features: width of the input.
        parts: checkpoint name of each projection and its output width, in the order of the stack.
    """

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool = False) -> None:
        super().__init__(in_features, sum(parts.values()), bias)
        self.parts = parts
