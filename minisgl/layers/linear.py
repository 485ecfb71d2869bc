"""Linear layers, alone or several stacked into one matrix product, whole or spread over the ranks."""

import torch
from minisgl_kernels import reference
from torch import nn

from minisgl.distributed.comm import ALONE, Comm
from minisgl.layers.shard import Shard, even_shard


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

    Column parallel (Megatron-LM, Shoeybi et al., 2019): a rank computes some of the output features, from all inputs.

    Args:
        in_features: width of the input.
        parts: checkpoint name of each projection and the rows of it that are held, in the order of the stack.
    """

    def __init__(self, in_features: int, parts: dict[str, Shard], bias: bool = False) -> None:
        super().__init__(in_features, sum(shard.size for shard in parts.values()), bias)
        self.parts = parts


class RowLinear(Linear):
    """Row parallel: a rank has some of the input features, and the products of all ranks are added.

    Behind a column-parallel layer that is the first point at which ranks need each other.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False, comm: Comm = ALONE) -> None:
        columns = even_shard(in_features, comm, dim=1)
        super().__init__(columns.size, out_features, bias)
        self.comm, self.shards = comm, {"weight": columns}

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [T, in_features / size] → [T, out_features]
        bias = self.bias if self.comm.rank == 0 else None  # once, not once for each rank
        return self.comm.all_reduce(self.ops.linear(x, self.weight, bias))
