"""Commands from rank 0 to the other ranks: a ring of fixed slots in shared memory that every rank reads in place.

Knows nothing of plans, models or how processes start: a command is a list of 1-d int64 arrays. Each rank has two
semaphores: `filled` counts slots that it has yet to read, `free` those that may be written over as far as it is
concerned. So rank 0 may run ahead by as many slots as there are, and who waits sleeps.

Idea: a bounded buffer with semaphores (Dijkstra, 1965), one for each of its readers; the generation at both ends of a
slot is a seqlock's.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.synchronize import Semaphore

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Alive = Callable[[], None] | None

HEADER = 4  # words ahead of a slot's part of a command: generation, the command's words, those before, generation
LOOK_S = 0.2  # between two calls of `alive` while waiting


class CommandRing:
    """Rank 0's end. Make it before the other ranks start; `reader(i)` is what rank i + 1 is given.

    A command that does not fit a slot is sent in parts, and may be larger than the whole ring. After an error in `send`
    the ring is of no more use: some ranks may have been sent what others have not. One thread may send.
    """

    def __init__(self, readers: int, slots: int = 8, slot_bytes: int = 1 << 16) -> None:
        """`slot_bytes` includes the header of 32 bytes and is rounded down to whole words of 8."""
        words = slot_bytes // 8
        if readers < 0 or slots < 1 or words <= HEADER:
            raise ValueError(
                f"a ring of {slots} slots of {slot_bytes} bytes for {readers} readers: "
                f"it needs a slot, {8 * (HEADER + 1)} bytes in each, and no negative number of readers"
            )
        spawn = get_context("spawn")
        self._block = _Block(create=True, size=8 * slots * words)  # a free name, chosen at random
        self._unlink = weakref.finalize(self, self._block.unlink)  # once; at the latest when the process exits
        self.memory = _slots(self._block, slots, words)  # (slots, words)
        self._filled = [spawn.Semaphore(0) for _ in range(readers)]
        self._free = [spawn.Semaphore(slots) for _ in range(readers)]
        self._sent = 0

    def reader(self, i: int) -> RingReader:
        """The end of rank i + 1: an argument for a process started by spawn. It arrives there attached."""
        slots, words = self.memory.shape
        return RingReader(self._block.name, slots, words, i + 1, self._filled[i], self._free[i])

    def send(
        self, arrays: Sequence[Ints], *, alive: Alive = None, timeout_s: float | None = None, stage: str = "step"
    ) -> None:
        """Send a command to every reader; returns when it stands in the ring, which is before they have read it.

        Args:
            arrays: 1-d, int64, any number of them, any lengths. They are copied.
            alive: called every 0.2 s while a slot is awaited; may raise.
            timeout_s: how long to wait for a reader to free a slot.
            stage: what the ranks are at; named when the time is over.

        Raises:
            TypeError: an array is of another type; nothing was sent.
            TimeoutError: a reader has freed no slot in time.
        """
        head = np.array([len(arrays), *map(len, arrays)], np.int64)
        command = np.concatenate([head, *arrays], dtype=np.int64, casting="no")
        slots, words = self.memory.shape
        for begin in range(0, len(command), words - HEADER):
            for i, free in enumerate(self._free):
                _wait(free, alive, timeout_s, f"rank 0 waits for rank {i + 1} to free one of {slots} slots ({stage})")
            part = command[begin : begin + words - HEADER]
            self._sent += 1
            slot = self.memory[self._sent % slots]
            slot[0] = self._sent
            slot[HEADER : HEADER + len(part)] = part
            slot[1:HEADER] = len(command), begin, self._sent
            for filled in self._filled:
                filled.release()

    def unlink(self) -> None:
        """Take the name away, once all readers have attached: then nothing stays behind however the processes end."""
        self._unlink()

    def close(self) -> None:
        """Unlink, and let go of memory and semaphores. A second call does nothing."""
        self._unlink()
        self.memory, self._filled, self._free = self.memory[:0].copy(), [], []
        self._block.close()


class RingReader:
    """The end of one of the other ranks. It reads one command at a time, in the order they were sent in."""

    def __init__(self, name: str, slots: int, words: int, rank: int, filled: Semaphore, free: Semaphore) -> None:
        self._arguments = (name, slots, words, rank, filled, free)
        self._block = _Block(name)
        self.rank = rank
        self.memory = _slots(self._block, slots, words)  # (slots, words)
        self.memory.flags.writeable = False
        self._filled, self._free = filled, free
        self._received = 0

    def __reduce__(self) -> tuple[type[RingReader], tuple[str, int, int, int, Semaphore, Semaphore]]:
        return RingReader, self._arguments

    @contextmanager
    def receive(
        self, *, alive: Alive = None, timeout_s: float | None = None, stage: str = "step"
    ) -> Iterator[list[Ints]]:
        """Wait for the next command and read it: `with reader.receive() as arrays`.

        The arrays are read-only. Those of a command in one slot are views of it, valid until the end of the `with`,
        which gives the slot back and empties the list; a command in several slots is joined in a copy.

        Args:
            alive: called every 0.2 s while a command is awaited; may raise.
            timeout_s: how long to wait for a slot to be filled.
            stage: what the ranks are at; named when the time is over.

        Raises:
            TimeoutError: rank 0 has filled no slot in time. Between two commands `receive` may be called again.
            RuntimeError: a slot is not the one that is due, or was written over while it was read.
        """

        def part(begin: int) -> tuple[int, Ints]:
            """The next slot: the command's words in all, and those from `begin` on that stand here."""
            _wait(self._filled, alive, timeout_s, f"rank {self.rank} waits for a command of rank 0 ({stage})")
            self._received += 1
            _, total, at, _ = self._header()
            if at != begin:
                raise RuntimeError(
                    f"rank {self.rank}: generation {self._received} holds a command from its word {at} on, "
                    f"word {begin} is due: a command broke off"
                )
            return total, self.memory[self._received % len(self.memory), HEADER:][: total - begin]

        total, words = part(0)
        if len(words) == total:
            arrays = _arrays(words)
            try:
                yield arrays
                self._header()
            finally:
                arrays.clear()
                self._free.release()
            return
        command, begin = np.empty(total, np.int64), 0
        while True:
            command[begin : begin + len(words)] = words
            begin += len(words)
            self._header()
            self._free.release()
            if begin == total:
                break
            _, words = part(begin)
        command.flags.writeable = False
        yield _arrays(command)

    def _header(self) -> list[int]:
        """The header of the slot that is being read, if it still is the one that it should be."""
        header: list[int] = self.memory[self._received % len(self.memory), :HEADER].tolist()
        if header[0] != self._received or header[-1] != self._received:
            raise RuntimeError(
                f"rank {self.rank}: torn read: generation {self._received} is due, "
                f"the slot was begun as {header[0]} and ended as {header[-1]}"
            )
        return header

    def close(self) -> None:
        """Let go of the memory. A second call does nothing."""
        self.memory = self.memory[:0].copy()
        self._block.close()


class _Block(SharedMemory):
    """Shared memory that stays mapped for as long as somebody holds a view of it, and is no error then.

    A process started by spawn shares its parent's resource tracker, which keeps a set of names: that a reader names the
    block too changes nothing there, and the one unlink takes the name out.
    """

    def close(self) -> None:
        with suppress(BufferError):
            super().close()


def _slots(block: SharedMemory, slots: int, words: int) -> Ints:
    """The block as (slots, words); some systems round its size up."""
    assert block.buf is not None  # it is, until close
    return np.frombuffer(block.buf, np.int64, slots * words).reshape(slots, words)


def _arrays(command: Ints) -> list[Ints]:
    """Views of the arrays of a command: their number, their lengths, then one behind the other."""
    end = 1 + int(command[0])
    arrays = []
    for length in command[1:end].tolist():
        arrays.append(command[end : end + length])
        end += length
    return arrays


def _wait(semaphore: Semaphore, alive: Alive, timeout_s: float | None, who: str) -> None:
    """Take the semaphore; asleep, but for a look every 0.2 s. `alive` comes first: it knows why nobody answers."""
    end = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    while not semaphore.acquire(timeout=max(0.0, min(LOOK_S, end - time.monotonic()))):
        if alive:
            alive()
        if time.monotonic() >= end:
            raise TimeoutError(f"{who}: nothing in {timeout_s} s")
