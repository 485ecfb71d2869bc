"""The processes of one engine: rank 0, which is the user's, starts the others, watches them and ends them.

Knows nothing of models, tensors or collectives: a worker runs whatever function it is given. Nor does it import torch
before it must, so that a worker minds its parent from its first tenth of a second on, while its target is being
imported. The user's script is not run again in a worker, as spawn would: nothing of ours is defined there, so it may
come from a file, a notebook or a pipe, and needs no `if __name__ == "__main__"` for us.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

_GRACE_S = 1.0  # for a worker to end by itself, and once more when it was killed
_SETTLE_S = 0.1  # after the first sign of a death: others may follow, and one of them may be its cause
_PATIENCE_S = 1.5  # for rank 0 to come back from a wait that a death may have made endless
AT_START = "MINISGL_AT_START"  # a variable: "module:function" that a worker calls before it imports its target
_starting = threading.Lock()


class RankDied(RuntimeError):
    """A worker ended before its time. Says which, and how: its traceback, its signal or its exit code."""


@dataclass(frozen=True)
class Seat:
    """A worker's place: who it is, and how it reaches rank 0."""

    rank: int
    size: int
    port: int
    timeout_s: float
    report: connection.Connection

    def connect(self) -> Any:
        """The TCPStore of this run, at which process groups meet."""
        return _store(self.port, self.timeout_s)

    def stage(self, doing: str) -> None:
        """Tells rank 0 what this worker does from now on ("loading weights"), for its messages."""
        self.report.send({"stage": doing})

    def ready(self, info: Any = None) -> None:
        """Ends the start of this worker; `info` (picklable) is what wait_ready() returns for it."""
        self.report.send({"ready": info, "stage": "running"})


class Ranks:
    """Starts ranks 1 … size - 1, all at once, each running `target(seat, *args)` until it returns.

    A worker returns when rank 0 tells it to, by whatever the two have agreed upon. If one dies instead, all others are
    killed, and the next check() or guard() raises RankDied. Nothing happens to a process that only holds a Ranks: a
    notebook survives the death of its workers.

    The workers end with close(), when nobody holds this object any more, and when the interpreter exits. If rank 0 is
    killed, they exit by themselves. Ctrl-C and SIGTERM are for rank 0 only.

    A worker may have workers of its own: they end with it, and with rank 0.

    Args:
        target: a function of an importable module; one of the user's script cannot be pickled.
        args: picklable for a spawned process; locks and shared memory of multiprocessing may be among them.
        timeout_s: until all must be ready, and of every wait at the store.
        names: what messages call the workers, where "rank 1", "rank 2", … would not say what they are.
    """

    def __init__(
        self,
        size: int,
        target: Callable[..., object],
        args: tuple[Any, ...] = (),
        timeout_s: float = 300.0,
        *,
        names: Sequence[str] = (),
    ) -> None:
        self.timeout_s, self._started = timeout_s, time.monotonic()
        self._crew = crew = _Crew(socket.create_server(("127.0.0.1", 0)))
        self._finalizer = Finalize(self, crew.end, (0.0,), exitpriority=0)  # no worker was told to return
        for rank, name in enumerate(names or [f"rank {rank}" for rank in range(1, size)], 1):
            report, theirs = connection.Pipe(duplex=False)
            work = (os.getpid(), Seat(rank, size, crew.port, timeout_s, theirs), _Late((target, args)))
            process = get_context("spawn").Process(target=_work, args=work, name=name, daemon=False)
            with _without_main():
                process.start()
            theirs.close()  # so that the pipe ends when the worker does
            crew.members.append(_Member(process, report))
        crew.watcher.start()

    @cached_property
    def store(self) -> Any:
        """Rank 0's connection to the TCPStore of this run, which listens at a free port, to this machine only.

        Made at the first use, which imports torch; workers that connect() wait until then."""
        self._crew.server = _store(self._crew.port, self.timeout_s, self._crew.listener)
        self.check()  # or nobody would break our waits there
        return _store(self._crew.port, self.timeout_s)

    def wait_ready(self) -> list[Any]:
        """Waits until all workers are ready and returns what they gave, rank 1 first.

        Raises:
            RankDied: one has died.
            TimeoutError: some are late; says which, and their stages. All have been ended.
        """
        crew, left_s = self._crew, self._started + self.timeout_s - time.monotonic()
        if _until(lambda: crew.death or not crew.late(), left_s):
            self.check()
            return [m.said["ready"] for m in crew.members]
        within = f"did not report ready within {self.timeout_s:g} s"
        late = [f"{m.process.name} {within}: it was {m.said['stage']}" for m in crew.late()]
        self.close(grace_s=0)
        raise TimeoutError("\n".join(late))

    def check(self) -> None:
        """Raises RankDied if a worker has died."""
        if self._crew.death:
            raise RankDied(self._crew.death)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Put around whatever waits for other ranks, in one thread: a step, or the making of a process group.

        If a worker dies, the wait may fail, return nonsense, or never return. In the first two cases RankDied is raised
        in place of what came. In the third, when the callback of on_death() has not broken the wait within 1.5 seconds,
        the reason goes to stderr and the process exits with code 1: Python cannot raise into a thread that waits
        outside of it. An error of rank 0's own passes, a second later.
        """
        crew = self._crew
        self.check()
        crew.guarded += 1
        try:
            yield
        except Exception:  # a connection may break before the watcher knows of the death that broke it
            _until(lambda: crew.death, _GRACE_S)
            self.check()
            raise
        finally:
            crew.guarded -= 1
        self.check()

    def settle(self) -> None:
        """Gives a death that may be behind an error half a second to become known, before close() ends all."""
        _until(lambda: self._crew.death, 5 * _SETTLE_S)

    def on_death(self, callback: Callable[[], object]) -> None:
        """Has `callback()` run in a thread of its own when a worker dies: it should abort what rank 0 may be waiting
        in (gloo's connections and the store's break by themselves). It must not hold this object alive."""
        self._crew.on_death = callback

    def close(self, grace_s: float = _GRACE_S) -> None:
        """Ends the workers: waits `grace_s` for those that return by themselves, and kills the rest."""
        self._crew.end(grace_s)


@dataclass
class _Member:
    """What rank 0 knows of a worker."""

    process: BaseProcess
    report: connection.Connection
    said: dict[str, Any] = field(default_factory=lambda: {"stage": "starting"})
    code: int | None = None  # its exit code, None while it runs

    def listen(self) -> None:
        self.code = self.process.exitcode  # first: all that one who has ended had to say is in its pipe
        try:
            while not self.report.closed and self.report.poll():
                self.said.update(self.report.recv())
        except (EOFError, OSError):  # its end, or half a message
            self.report.close()

    def death(self) -> tuple[bool, float, str] | None:
        """How this worker died. The least of several is the cause of the others: nobody is killed by another's death,
        and of those that failed, the first did not fail for it."""
        if "failed" in self.said:
            when, text = self.said["failed"]
            return True, when, f"{self.process.name} failed:\n{text}"
        if self.code is None or (self.code == 0 and "ready" in self.said):
            return None
        name = {s.value: s.name for s in signal.Signals}.get(-self.code, "?")
        how = f"exited with code {self.code}" if self.code >= 0 else f"was killed by signal {-self.code} ({name})"
        return self.code >= 0, float("inf"), f"{self.process.name} {how} while {self.said['stage']}"


class _Crew:
    """The workers and the thread that watches them; apart from Ranks, which must be free to go while the thread runs.

    Only that thread asks after processes and ends them, and when it has gone, end()."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener, self.port, self.server = listener, listener.getsockname()[1], None
        self.members: list[_Member] = []
        self.death, self.guarded, self.closing = "", 0, False
        self.on_death: Callable[[], object] | None = None
        self.woken, self.wake = connection.Pipe(duplex=False)
        self.watcher = threading.Thread(target=self.watch, daemon=True)

    def watch(self) -> None:
        while not self.closing:
            pipes = [m.report for m in self.members if not m.report.closed]
            connection.wait([self.woken, *pipes, *(m.process.sentinel for m in self.members if m.code is None)])
            if self.deaths() and not self.closing:
                return self.mourn()

    def deaths(self) -> list[tuple[bool, float, str]]:
        for member in self.members:
            member.listen()
        return [death for m in self.members if (death := m.death())]

    def late(self) -> list[_Member]:
        return [m for m in self.members if "ready" not in m.said]

    def gone(self) -> bool:
        return all([m.process.exitcode is not None for m in self.members])  # a list: asking reaps

    def mourn(self) -> None:
        time.sleep(_SETTLE_S)
        self.death = min(self.deaths())[-1]
        for member in self.members:
            member.process.kill()
        self.server = None  # breaks rank 0's waits at the store
        if self.on_death:
            threading.Thread(target=self.on_death, daemon=True).start()
        _until(lambda: self.gone() and (self.closing or not self.guarded), _PATIENCE_S)
        if self.guarded and not self.closing:
            sys.stdout.flush()
            print(f"minisgl: {self.death}", file=sys.stderr, flush=True)
            os._exit(1)

    def end(self, grace_s: float) -> None:
        if self.closing:
            return
        self.closing = True
        self.wake.send(None)
        self.listener.close()
        if self.watcher.is_alive() and self.watcher is not threading.current_thread():
            self.watcher.join()
        _until(self.gone, grace_s)
        for member in self.members:
            member.process.kill()
        _until(self.gone, _GRACE_S)


class _Late:
    """Is pickled apart from what it travels with, and unpickled only when it is asked for: that imports modules."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getstate__(self) -> bytes:
        return bytes(ForkingPickler.dumps(self.value))

    def __setstate__(self, data: bytes) -> None:
        self.data = data


def _work(parent: int, seat: Seat, late: _Late) -> None:
    """A worker's main function."""
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):  # go to all processes of a terminal or a service: rank 0 decides
        signal.signal(number, signal.SIG_IGN)
    try:
        if first := os.environ.get(AT_START):
            resolve_name(first)()
        target, args = pickle.loads(late.data)
        target(seat, *args)
        gc.freeze()  # or Python, as it ends, looks through all objects of torch for most of a second
    except Exception:
        seat.report.send({"failed": (time.time(), traceback.format_exc())})
        sys.stdout.flush()
        os._exit(1)  # an orderly exit may wait for the other ranks


def _follow(parent: int) -> None:
    """Into death. A pipe's end would tell as much, but not while a child that the parent has forked keeps it open."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


@contextmanager
def _without_main() -> Iterator[None]:
    """A process that is started inside does not run the user's script."""
    with _starting:  # sys.modules is everyone's
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def _until(true: Callable[[], object], timeout_s: float) -> bool:
    """Whether it comes true in this time; looks every 10 ms."""
    end = time.monotonic() + timeout_s
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(true())


def _store(port: int, timeout_s: float, listener: socket.socket | None = None) -> Any:
    """A connection to the store at `port`; with a listening socket, the store itself."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    fd, limit = None if listener is None else listener.detach(), timedelta(seconds=timeout_s)
    return TCPStore("127.0.0.1", port, None, fd is not None, limit, False, master_listen_fd=fd)
