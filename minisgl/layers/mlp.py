"""The gated MLP of Llama and its relatives."""

import torch
from minisgl_kernels import reference
from torch import nn

from minisgl.distributed.comm import ALONE, Comm
from minisgl.layers.linear import MergedLinear, RowLinear
from minisgl.layers.shard import divided, even_shard


class GatedMLP(nn.Module):
    """down(silu(gate(x)) · up(x)) (SwiGLU, Shazeer, 2020)."""

    ops = reference

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False, comm: Comm = ALONE) -> None:
        super().__init__()
        divided(intermediate_size, "features of the MLP", comm.size)
        rows = even_shard(intermediate_size, comm)
        self.gate_up_proj = MergedLinear(hidden_size, {"gate_proj": rows, "up_proj": rows}, bias)
        self.down_proj = RowLinear(intermediate_size, hidden_size, bias, comm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [T, hidden]
        gate_up = self.gate_up_proj
        return self.down_proj(self.ops.linear_silu_mul(x, gate_up.weight, gate_up.bias))
