"""A score for kernels that needs no GPU: bytes moved per useful byte, counted in Triton's interpreter.

A kernel that moves each byte once scores 1.0; one that reads its input a second time, or writes what it will read
again elsewhere, more. It knows nothing of caches, of sectors of 32 bytes, nor of time.
Idea: the reads and writes that the Triton and GPU Puzzles count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import triton

_COMPACT = 1 << 20  # addresses kept before they are merged into ranges


@dataclass
class ByteCount:
    """What was moved between memory and kernels; filled when the block of `count_bytes` ends.

    Lanes of one load that read the same address count once, as the hardware reads it once for them; two loads of it
    count twice. An atomic operation reads and writes.
    """

    read: int = 0
    written: int = 0
    read_distinct: int = 0  # bytes that were read at least once
    written_distinct: int = 0
    kernels: dict[str, ByteCount] = field(default_factory=dict)  # the same, by kernel

    @property
    def moved(self) -> int:
        """All bytes read and written."""
        return self.read + self.written

    @property
    def distinct(self) -> int:
        """The same, had each been moved once in its direction."""
        return self.read_distinct + self.written_distinct

    @property
    def score(self) -> float:
        """Bytes moved per useful byte: 1.0 is ideal. ValueError if nothing was moved."""
        if not self.moved:
            raise ValueError("no kernel ran in Triton's interpreter within count_bytes(): nothing to score")
        return self.moved / self.distinct


@contextmanager
def count_bytes() -> Iterator[ByteCount]:
    """Count what the Triton kernels that run in this block read and write.

    A byte's address stands for the byte: keep tensors alive within the block, else two may share it.

    Raises:
        RuntimeError: Triton does not interpret kernels here, so there is nothing to watch.
    """
    if not triton.knobs.runtime.interpret:
        raise RuntimeError("bytes are counted in Triton's interpreter only: start Python with TRITON_INTERPRET=1")
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    traffic: dict[str, _Traffic] = {}
    running: list[_Traffic] = []
    total = ByteCount()

    def launch(run: Callable[..., Any], executor: Any, *args: Any, **kwargs: Any) -> Any:
        running.append(traffic.setdefault(executor.fn.__name__, _Traffic(_Ranges(), _Ranges())))
        try:
            return run(executor, *args, **kwargs)
        finally:
            running.pop()

    def load(run: Callable[..., Any], builder: Any, pointers: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        running[-1].read.add(pointers, mask)
        return run(builder, pointers, mask, *args, **kwargs)

    def store(
        run: Callable[..., Any], builder: Any, pointers: Any, value: Any, mask: Any, *args: Any, **kw: Any
    ) -> Any:
        running[-1].written.add(pointers, mask)
        return run(builder, pointers, value, mask, *args, **kw)

    def update(run: Callable[..., Any], builder: Any, op: Any, pointers: Any, value: Any, mask: Any, *args: Any) -> Any:
        running[-1].add(pointers, mask)
        return run(builder, op, pointers, value, mask, *args)

    def swap(run: Callable[..., Any], builder: Any, pointers: Any, *args: Any) -> Any:
        running[-1].add(pointers, None)
        return run(builder, pointers, *args)

    with (
        _around(GridExecutor, "__call__", launch),
        _around(InterpreterBuilder, "create_masked_load", load),  # all other loads and stores end in these two
        _around(InterpreterBuilder, "create_masked_store", store),
        _around(InterpreterBuilder, "create_atomic_rmw", update),
        _around(InterpreterBuilder, "create_atomic_cas", swap),
    ):
        yield total

    total.kernels = {name: _count([own]) for name, own in traffic.items()}
    every = _count(list(traffic.values()))
    total.read, total.written = every.read, every.written
    total.read_distinct, total.written_distinct = every.read_distinct, every.written_distinct


class _Ranges:
    """Addresses of one direction: how many bytes, and which."""

    def __init__(self) -> None:
        self.moved = 0
        self.starts = self.ends = np.empty(0, np.uint64)  # merged
        self._fresh: list[tuple[Any, int]] = []
        self._waiting = 0

    def add(self, pointers: Any, mask: Any) -> None:
        """Note one load or store; the handles are those of Triton's interpreter."""
        addresses = np.atleast_1d(pointers.data)
        if mask is not None:
            addresses = addresses[np.broadcast_to(mask.data, addresses.shape)]
        addresses = np.unique(addresses)
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)  # a Boolean takes a byte
        self.moved += size * addresses.size
        self._fresh.append((addresses, size))
        self._waiting += addresses.size
        if self._waiting > _COMPACT:
            self.merge()

    def merge(self) -> None:
        """Bring what is fresh into the merged ranges."""
        starts = [self.starts, *(addresses for addresses, _ in self._fresh)]
        ends = [self.ends, *(addresses + np.uint64(size) for addresses, size in self._fresh)]
        self.starts, self.ends = _union(np.concatenate(starts), np.concatenate(ends))
        self._fresh, self._waiting = [], 0


class _Traffic(NamedTuple):
    """One kernel's."""

    read: _Ranges
    written: _Ranges

    def add(self, pointers: Any, mask: Any) -> None:
        self.read.add(pointers, mask)
        self.written.add(pointers, mask)


def _count(kernels: list[_Traffic]) -> ByteCount:
    reads, writes = [k.read for k in kernels], [k.written for k in kernels]
    return ByteCount(_moved(reads), _moved(writes), _distinct(reads), _distinct(writes))


def _moved(parts: list[_Ranges]) -> int:
    return sum(part.moved for part in parts)


def _distinct(parts: list[_Ranges]) -> int:
    for part in parts:
        part.merge()
    if not parts:
        return 0
    starts, ends = _union(np.concatenate([p.starts for p in parts]), np.concatenate([p.ends for p in parts]))
    return int((ends - starts).sum())


def _union(starts: Any, ends: Any) -> tuple[Any, Any]:
    """Ranges that do not touch, which hold the same addresses."""
    if not starts.size:
        return starts, ends
    order = np.argsort(starts)
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    opens = np.concatenate([[True], starts[1:] > reach[:-1]])
    return starts[opens], reach[np.append(np.flatnonzero(opens)[1:] - 1, starts.size - 1)]


def _around(owner: type, name: str, wrapper: Callable[..., Any]) -> Any:
    """The method `name` of `owner`, called through `wrapper(method, self, …)` until the patch ends."""
    method = getattr(owner, name)
    return patch.object(owner, name, lambda self, *args, **kwargs: wrapper(method, self, *args, **kwargs))
