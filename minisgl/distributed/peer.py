"""Small sums by a kernel of our own over peer memory: minisgl_kernels.triton.all_reduce says how."""

from __future__ import annotations

from itertools import combinations

import torch
from minisgl_kernels import why_not

from minisgl.distributed.comm import GroupComm

SLOT_BYTES = 1 << 19  # the largest x that goes through the kernel: all of it is sent to each rank, a ring sends parts
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class PeerComm:
    """A group of GPUs that write to each other's memory, or of several ranks on one GPU.

    Args:
        comm: the same group's collectives, for what is large, for what is no sum, and to meet.
        device: this rank's GPU.

    Raises:
        RuntimeError: the driver does not let these processes reach each other's memory.
    """

    def __init__(self, comm: GroupComm, device: torch.device) -> None:
        from minisgl_kernels.cuda.peer_memory import PeerMemory
        from minisgl_kernels.triton import all_reduce, norm

        self.comm, self.rank, self.size, self.in_graphs = comm, comm.rank, comm.size, comm.in_graphs
        self._kernels, self._norm = all_reduce, norm
        nbytes = all_reduce.GENERATIONS * comm.size * SLOT_BYTES
        try:
            self._memory = PeerMemory(nbytes, all_reduce.CLEAR, device, comm.rank, comm.gather_bytes)
        except RuntimeError as error:
            raise RuntimeError(f"custom_all_reduce has no peer memory: {error}; use --no-custom-all-reduce") from error
        pointers = torch.tensor(self._memory.pointers, dtype=torch.int64, device=device)
        state = torch.zeros(3, dtype=torch.int32, device=device)
        broken = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._inbox = all_reduce.Inbox(pointers, state, broken, comm.rank, SLOT_BYTES)
        torch.cuda.synchronize(device)  # other streams may use all this

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if not self._takes(x):
            return self.comm.all_reduce(x)
        return self._kernels.all_reduce(x.contiguous(), self._inbox)

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of residual + the sum of all ranks' x, and that sum; in one launch where x is small."""
        if not self._takes(x):
            return self._norm.add_rms_norm(self.comm.all_reduce(x), residual, weight, eps)
        return self._kernels.all_reduce_add_rms_norm(x.contiguous(), residual, weight, eps, self._inbox)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self.comm.all_gather(x)

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        return self.comm.broadcast(x, src)

    def minimum(self, n: int) -> int:
        return self.comm.minimum(n)

    def abort(self) -> None:
        """End collectives that wait for a rank that is gone. Our kernels then end with sums that mean nothing."""
        self._inbox.broken[0] = 1
        self.comm.abort()

    def close(self) -> None:
        """Give the memory back. The group is at rest, or broken; it computes nothing from now on."""
        self._inbox.broken[0] = 1
        self._memory.close()

    def _takes(self, x: torch.Tensor) -> bool:
        """Whether x goes through the kernel: a question of its kind and size, so all ranks answer alike."""
        return x.is_cuda and x.dtype in _DTYPES and self._inbox.takes(x)


def require_peers(device: torch.device, backend: str, size: int) -> None:
    """Refuse custom_all_reduce where it cannot run, before there are processes.

    Raises:
        ValueError: no GPU, no Triton, or two GPUs that cannot reach each other's memory.
    """
    reason = why_not("triton", device, torch.float16) if device.type == "cuda" else f"it is for GPUs, not for {device}"
    for pair in combinations(range(size if backend == "nccl" else 1), 2):
        if not reason and not torch.cuda.can_device_access_peer(*pair):
            reason = f"GPUs {pair[0]} and {pair[1]} cannot reach each other's memory"
    if reason:
        raise ValueError(f"custom_all_reduce cannot be used: {reason}; use --no-custom-all-reduce")
