"""Ranks that meet, and a checkpoint's tensor that knows what is read of it."""

from __future__ import annotations

from typing import Any

import torch

from minisgl.distributed.comm import Comm


class OnDisk(torch.Tensor):
    """A tensor of a file: counts the numbers that are read of it. A view, however it is made, reads nothing."""

    read = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            files = [arg for arg in args if isinstance(arg, OnDisk)]
            places = {arg.untyped_storage().data_ptr() for arg in files}
            plain = [arg.as_subclass(torch.Tensor) if isinstance(arg, OnDisk) else arg for arg in args]
            result = function(*plain, **(kwargs or {}))
            several = result if isinstance(result, (tuple, list)) else [result]
            tensors = [each for each in several if isinstance(each, torch.Tensor)]
            if tensors and all(each.untyped_storage().data_ptr() in places for each in tensors):
                views = [each.as_subclass(OnDisk) for each in tensors]
                return tuple(views) if isinstance(result, (tuple, list)) else views[0]
            if tensors or function is torch.Tensor.__setitem__:
                OnDisk.read += sum(arg.numel() for arg in files)
        return result


def counted(*shape: int) -> torch.Tensor:
    """1, 2, 3, … in this shape."""
    return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def filled(module: Any, full: torch.Tensor) -> Any:
    """A layer with its shard of a checkpoint's tensor."""
    module.requires_grad_(False)
    module.shards["weight"].fill(module.weight, full)
    return module


class EqualShapes:
    """Passes collectives on, if all ranks come with the same shape: others wait for ever, or read too far."""

    def __init__(self, comm: Comm) -> None:
        self.comm, self.rank, self.size, self.in_graphs = comm, comm.rank, comm.size, False

    def _check(self, x: torch.Tensor) -> torch.Tensor:
        for n in x.shape:
            least, most = self.comm.minimum(n), -self.comm.minimum(-n)
            assert least == most, f"one rank comes with {least} where another has {most}: padding goes along"
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self.comm.all_gather(self._check(x))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self.comm.all_reduce(self._check(x))
