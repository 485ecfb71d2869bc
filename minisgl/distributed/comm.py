"""What the ranks of a group compute together: four collectives behind one interface. Knows nothing of models."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed exports it in a way that mypy cannot follow


class Comm(Protocol):
    """One rank's end of its group. All ranks make the same calls in the same order, or wait for ever."""

    rank: int  # 0 … size - 1
    size: int
    in_graphs: bool  # whether a CUDA graph can hold its collectives

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x. May be written into x, so use what is returned."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' x [..., n] behind one another, in the order of ranks: [..., size · n]."""
        ...

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Rank src's x, whose shape and dtype all ranks know. May be written into x, so use what is returned."""
        ...

    def minimum(self, n: int) -> int:
        """The least of all ranks' n."""
        ...


class SummingComm(Comm, Protocol):
    """One that takes a sum together with what follows it in a decoder."""

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """add_rms_norm of the sum of all ranks' x."""
        ...


class Alone:
    """The group of one process: every collective returns what it got."""

    rank, size, in_graphs = 0, 1, True

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        return x

    def minimum(self, n: int) -> int:
        return n


ALONE = Alone()


class Unsummed:
    """A group for layers whose results are summed later, by whoever reads them next. The rest is as it was."""

    def __init__(self, comm: Comm) -> None:
        self.rank, self.size, self.in_graphs = comm.rank, comm.size, comm.in_graphs
        self.all_gather, self.broadcast, self.minimum = comm.all_gather, comm.broadcast, comm.minimum

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


class GroupComm:
    """Collectives of torch.distributed. Those that return x's shape write into x.

    Args:
        group: a ProcessGroupGloo or ProcessGroupNCCL, as `connect` makes them. It is used as it is, without a default
            group, so one process can be in several engines.
        host_group: gloo beside NCCL, for what lies on the host. Without it, `group` is gloo, and takes a GPU's tensors
            by way of the host, which waits for the GPU: no such step can be in a CUDA graph.
    """

    def __init__(self, group: Any, host_group: Any = None) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.group, self.host_group = group, host_group or group
        self.in_graphs = host_group is not None
        self._sum, self._gather = _options("Allreduce"), _options("Allgather")

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        near = self._near(x)
        _wait(self.group.allreduce([near], self._sum))
        return x if near is x else x.copy_(near)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        near = self._near(x)
        gathered = near.new_empty(self.size * len(near), *near.shape[1:])  # rank by rank
        _wait(self.group._allgather_base(gathered, near, self._gather))
        return torch.cat(gathered.view(self.size, *near.shape).unbind(), dim=-1).to(x.device)

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        near, options = self._near(x), _options("Broadcast")
        options.rootRank = src
        _wait(self.group.broadcast([near], options))
        return x if near is x else x.copy_(near)

    def minimum(self, n: int) -> int:
        least, options = torch.tensor([n], dtype=torch.int64, device="cpu"), _options("Allreduce")
        options.reduceOp = torch.distributed.ReduceOp.MIN
        _wait(self.host_group.allreduce([least], options))
        return int(least)

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        """All ranks' bytes, equally many of each, in the order of ranks."""
        near = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        gathered = near.new_empty(self.size * len(near))
        _wait(self.host_group._allgather_base(gathered, near, self._gather))
        return [part.numpy().tobytes() for part in gathered.view(self.size, -1)]

    def abort(self) -> None:
        """End collectives that wait for a rank that is gone. Gloo's end by themselves, when its connection breaks."""
        if self.group is not self.host_group:
            self.group.abort()

    def close(self) -> None:
        """Give back what only these collectives hold, which is nothing: the groups go with this object."""

    def _near(self, x: torch.Tensor) -> torch.Tensor:
        """x, or a copy of it, where the group can reach it."""
        return (x if self.in_graphs else x.cpu()).contiguous()


def connect(store: Store, rank: int, size: int, backend: str, timeout_s: float = 1800) -> GroupComm:
    """Join the group that meets at this store, on this machine; returns when all ranks have.

    Args:
        store: all ranks' own connection to one TCPStore or FileStore that no other group uses.
        backend: "gloo" on CPUs, or for several ranks on one GPU; "nccl" with a GPU for each rank, the current device.
        timeout_s: how long a collective, or joining, waits for the other ranks.
    """
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed import ProcessGroupGloo

    gloo = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = timedelta(seconds=timeout_s)
    # Without an address gloo looks the host's name up, which fails in containers, and listens to the network.
    gloo._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    host_group = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, gloo)
    if backend == "gloo":
        return GroupComm(host_group)
    from torch.distributed import ProcessGroupNCCL

    nccl = ProcessGroupNCCL.Options()
    nccl._timeout = timedelta(seconds=timeout_s)
    comm = GroupComm(ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, nccl), host_group)
    comm.all_reduce(torch.zeros(1, device="cuda"))  # NCCL connects at the first call, which a graph must not record
    return comm


def _options(collective: str) -> Any:
    """Of a call that stays in the order of the current stream, as a graph needs it."""
    from torch._C import _distributed_c10d

    options = getattr(_distributed_c10d, f"{collective}Options")()
    options.asyncOp = False
    return options


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()
