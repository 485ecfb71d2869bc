"""The gated MLP of Llama and its relatives."""

import torch
from minisgl_kernels import reference
from torch import nn

from minisgl.layers.linear import Linear, MergedLinear


class GatedMLP(nn.Module):
    """down(silu(gate(x)) · up(x)) (SwiGLU, Shazeer, 2020)."""

    ops = reference

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = MergedLinear(
            hidden_size, {"gate_proj": intermediate_size, "up_proj": intermediate_size}, bias
        )
        self.down_proj = Linear(intermediate_size, hidden_size, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [T, hidden]
        gate_up = self.gate_up_proj
        return self.down_proj(self.ops.linear_silu_mul(x, gate_up.weight, gate_up.bias))
