"""RMSNorm as a module."""

import torch
from minisgl_kernels import reference
from torch import nn

from minisgl.distributed.comm import SummingComm


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension (Zhang & Sennrich, 2019)."""

    ops = reference

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [..., size]
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalise residual + x, both [..., size]; returns (normalised, the sum). Without a residual x is the sum."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)


class SummingNorm(RMSNorm):
    """The same where x of `add` is this rank's part of a sum over all ranks, which is taken on the way."""

    def __init__(self, size: int, eps: float, comm: SummingComm) -> None:
        super().__init__(size, eps)
        self.comm = comm

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return self.comm.all_reduce_add_rms_norm(x, residual, self.weight, self.eps)
