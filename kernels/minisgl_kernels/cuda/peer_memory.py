"""Memory of a GPU that other processes can reach: on another GPU through NVLink or PCIe, or on the same one.

Each rank allocates some, and opens that of all others by its IPC handle, 64 bytes that any process of this machine can
use. Through ctypes on the driver, as torch's own allocations may be parts of a block that should not be shared. Knows
nothing of what the memory is for.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Sequence

import torch

from minisgl_kernels.cuda.driver import _check, _driver, _enter_context

_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_SHARED_ALONE = 1 << 21  # bytes: smaller allocations may share a block, all of which a handle would give away


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 64),)


class PeerMemory:
    """One rank's memory, and its way to the others'. All ranks make it at the same time.

    Args:
        nbytes: of each rank.
        pattern: 16 bits that the memory holds at first.
        device: this rank's GPU.
        exchange: takes this rank's bytes to all others, and returns those of all, in the order of ranks.

    Attributes:
        pointers: where each rank's memory is for kernels on `device`, in the order of ranks. Valid until close().

    Raises:
        RuntimeError: what the driver says where GPUs cannot reach each other, or IPC is not allowed.
    """

    def __init__(
        self, nbytes: int, pattern: int, device: torch.device, rank: int, exchange: Callable[[bytes], Sequence[bytes]]
    ) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # this may be a process's first use of its GPU
        index = torch.cuda.current_device() if device.index is None else device.index
        _enter_context(index)
        nbytes = -(-nbytes // _SHARED_ALONE) * _SHARED_ALONE
        mine, handle, opened = ctypes.c_uint64(), _Handle(), list[int]()
        _check(_api().cuMemAlloc_v2(ctypes.byref(mine), nbytes))
        self._close = weakref.finalize(self, _free, index, mine.value, opened)
        self._close.atexit = False  # the driver takes all back, and may already be gone
        _check(_api().cuMemsetD16_v2(mine, pattern, nbytes // 2))
        torch.cuda.synchronize(index)  # before anybody writes
        _check(_api().cuIpcGetMemHandle(ctypes.byref(handle), mine))
        self.pointers = list[int]()
        for peer, theirs in enumerate(exchange(bytes(handle))):
            pointer = ctypes.c_uint64(mine.value)
            if peer != rank:
                _check(
                    _api().cuIpcOpenMemHandle_v2(
                        ctypes.byref(pointer), _Handle.from_buffer_copy(theirs), _ENABLE_PEER_ACCESS
                    )
                )
                opened.append(pointer.value)
            self.pointers.append(pointer.value)

    def close(self) -> None:
        """Let go of the others' memory and give this rank's back, once no kernel of this process uses either.

        It may be that another rank has ended, in whatever way. Writing to memory that its owner has given back is an
        error: close when all ranks are at rest, or have gone.
        """
        self._close()


def _free(device: int, mine: int, opened: Sequence[int]) -> None:
    """Errors are ignored: after one in a kernel every call returns it, and the memory goes with the process."""
    _enter_context(device)
    _api().cuCtxSynchronize()
    for pointer in opened:
        _api().cuIpcCloseMemHandle(pointer)
    _api().cuMemFree_v2(mine)


@functools.cache
def _api() -> ctypes.CDLL:
    api, pointer = _driver(), ctypes.c_uint64
    api.cuMemAlloc_v2.argtypes = [ctypes.POINTER(pointer), ctypes.c_size_t]
    api.cuMemFree_v2.argtypes = [pointer]
    api.cuMemsetD16_v2.argtypes = [pointer, ctypes.c_ushort, ctypes.c_size_t]
    api.cuIpcGetMemHandle.argtypes = [ctypes.POINTER(_Handle), pointer]
    api.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(pointer), _Handle, ctypes.c_uint]
    api.cuIpcCloseMemHandle.argtypes = [pointer]
    return api
