"""The engine's own process: takes messages, runs steps, tells what each of them brought. It sees no text.

Imports torch only when it is already connected, so that whoever waits for it hears of its first stages.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from minisgl.config import EngineConfig
from minisgl.core import Request
from minisgl.distributed.ranks import RankDied, Seat
from minisgl.engine.trace import Trace
from minisgl.message import messages as m

if TYPE_CHECKING:
    from minisgl.engine.engine import Engine

TRACE_EVERY_S = 0.04  # of events for watchers: a screen shows no more
_IDLE_MS = 500  # between two looks at the other ranks while nobody asks for anything


def address(folder: Path) -> str:
    """Where the two meet: a socket in a folder that only this user may enter."""
    return f"ipc://{folder}/engine"


def run(seat: Seat, config: EngineConfig, folder: Path, sockets: Path) -> None:
    """The process, from its start to its end: make the engine of a checkpoint's folder, and serve the front."""
    front = Front(sockets)

    def stage(doing: str) -> None:
        seat.stage(doing)
        front.send(m.Stage(doing))

    stage("importing torch")
    from minisgl.engine.group import open_engine

    stage("loading the model")
    try:
        engine = open_engine(config, folder)
    except ValueError as error:
        front.send(m.Refused(str(error)))
        front.wait()  # to be ended
        return
    seat.ready()
    Server(engine, front).serve()


class Front:
    """The way to the front: nothing waits on it, whatever it does."""

    def __init__(self, sockets: Path) -> None:
        self._socket = zmq.Context().socket(zmq.PAIR)
        self._socket.linger = 0  # at our end nobody listens any more
        self._socket.set_hwm(0)
        self._socket.connect(address(sockets))

    def send(self, message: m.FromEngine) -> None:
        self._socket.send(m.encode(message))

    def wait(self, timeout_ms: int | None = None) -> None:
        """Until there is a message."""
        self._socket.poll(timeout_ms)

    def messages(self) -> list[m.ToEngine]:
        """All that are here."""
        found = []
        while self._socket.poll(0):
            found.append(m.decode_to_engine(self._socket.recv()))
        return found


class Server:
    """The loop around an engine."""

    def __init__(self, engine: Engine, front: Front) -> None:
        self.engine, self.front = engine, front
        self._known: dict[int, int] = {}  # tokens that the front has of each open answer

    def serve(self) -> None:
        """Until the front says Stop."""
        engine, config = self.engine, self.engine.model.config
        eos, device = list(config.eos_token_ids), str(engine.model.device)
        self.front.send(m.Ready(device, engine.scheduler.max_len, config.vocab_size, eos, self._gauges()))
        while True:
            if not engine.has_work:
                self.front.wait(_IDLE_MS)
            for message in self.front.messages():
                if isinstance(message, m.Stop):
                    return self._close()
                self._take(message)
            with engine.guard():  # even without work: another rank may have died
                if engine.has_work:
                    self._tell(engine.step())

    def _take(self, message: m.ToEngine) -> None:
        if isinstance(message, m.Submit):
            self._known[message.id] = 0
            self.engine.add(message.request())
        elif isinstance(message, m.Abort):
            self.engine.abort(message.id, message.reason)
        elif isinstance(message, m.AskStats):
            self.front.send(m.Stats(message.id, self.engine.stats()))
        elif isinstance(message, m.Watch) and message.on:
            self.engine.trace[f"watcher {message.id}"] = self._trace(message.id)
        elif isinstance(message, m.Watch):
            self.engine.trace.pop(f"watcher {message.id}", None)

    def _trace(self, watcher: int) -> Trace:
        def send(line: str) -> None:
            self.front.send(m.Event(watcher, line.rstrip()))

        trace = Trace(send, self.engine.scheduler, TRACE_EVERY_S)
        trace.write(None, [])  # what is there already
        return trace

    def _tell(self, requests: list[Request]) -> None:
        outputs = [m.news(request, self._known[request.id]) for request in requests]
        for output in outputs:
            if output.finish_reason:
                del self._known[output.id]
            else:
                self._known[output.id] += len(output.tokens)
        self.front.send(m.StepDone(outputs, self._gauges()))

    def _gauges(self) -> m.Gauges:
        engine, work = self.engine, self.engine.work
        scheduler = engine.scheduler
        return m.Gauges(
            len(scheduler.running),
            len(scheduler.waiting),
            engine.pages.capacity,
            scheduler.cache.num_available,
            engine.prefix.num_pages,
            work.steps,
            work.tokens_computed,
            work.tokens_reused,
            work.preemptions,
        )

    def _close(self) -> None:
        for request_id in list(self._known):
            self.engine.abort(request_id)
        with suppress(RankDied):
            while self.engine.has_work:
                self.engine.step()
        self.engine.close()
