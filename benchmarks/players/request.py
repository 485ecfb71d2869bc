"""A request's way through the processes of a real server: who does what at which moment, on one clock.

Twice: an answer that comes to its end, and one whose client hangs up in the middle of a step. Client and front are
threads of this process, the engine has its own; each notes what it does, by the clock that all processes share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import minisgl_hub as hub

from benchmarks.ch10_serving import Notes, ask, own_port, serving
from benchmarks.record import save
from minisgl.config import EngineConfig
from minisgl.core import Batch, Request
from minisgl.distributed.ranks import Seat
from minisgl.engine.runner import Flight
from minisgl.message import messages as m
from minisgl.server import client, engine_process, live, serve, service
from minisgl.server.config import ServerConfig
from minisgl.tokenizer import answer

RUNS = {  # what is asked, the most new tokens, and after how many pieces the client goes; 0: it stays
    "to its end": ("What is the capital of France?", 6, 0),
    "the client hangs up": ("Name the days of the week.", 40, 3),
}
WARM = "Say something."


class Noted(engine_process.Server):
    """The engine's loop, which notes what it takes, its steps, and what it tells."""

    def __init__(self, engine: Any, front: engine_process.Front, notes: Notes) -> None:
        super().__init__(engine, front)
        self.notes, launch = notes, engine.launch

        def noted_launch(batch: Batch) -> Flight:
            self.notes.add("step", rows=[[request.id, start, tokens] for request, start, tokens in batch])
            return launch(batch)

        engine.launch = noted_launch

    def _take(self, message: m.ToEngine) -> None:
        self.notes.add(f"takes {type(message).__name__}")
        super()._take(message)

    def _tell(self, requests: list[Request]) -> None:
        gauges = self._gauges()
        outputs = [[request.id, request.output[-1:], request.finish_reason] for request in requests]
        self.notes.add("StepDone", outputs=outputs, available=gauges.pages_available, pages=gauges.pages)
        super()._tell(requests)


def noted_process(path: Path, seat: Seat, config: EngineConfig, folder: Path, sockets: Path) -> None:
    """In place of engine_process.run."""
    with patch.object(engine_process, "Server", partial(Noted, notes=Notes(path, "engine"))):
        engine_process.run(seat, config, folder, sockets)


def noted_front(notes: Notes) -> Iterator[Any]:
    """Patches after which the front notes what it does."""
    start, encode, send = service.Service.answer, client.EngineClient.encode, client.EngineClient._send
    take, read, events, hung_up = client.EngineClient._take, answer.Answer.read, live.Live.events, live._hung_up

    def noted_answer(self: service.Service, *args: Any, **more: Any) -> live.Live:
        notes.add("checked")
        return start(self, *args, **more)

    async def noted_encode(self: client.EngineClient, prompt: Any) -> list[int]:
        notes.add("encodes")
        ids = await encode(self, prompt)
        notes.add("encoded", tokens=len(ids))
        return ids

    def noted_send(self: client.EngineClient, data: bytes) -> None:
        message = m.decode_to_engine(data)
        open_ = isinstance(message, m.Submit | m.Abort) and message.id in self._open
        if open_:
            notes.add(type(message).__name__, id=message.id, bytes=len(data))
        send(self, data)

    def noted_take(self: client.EngineClient, message: m.FromEngine) -> None:
        if isinstance(message, m.StepDone):
            notes.add("takes StepDone", tokens=[token for output in message.outputs for token in output.tokens])
        take(self, message)

    def noted_read(self: answer.Answer) -> None:
        read(self)
        notes.add("text", text=self.unread, reason=self.completion.finish_reason)

    async def noted_events(self: live.Live, data: bytes, last: bool = False) -> None:
        notes.add("events", bytes=len(data), last=last)
        await events(self, data, last)

    async def noted_hung_up(receive: Any) -> None:
        await hung_up(receive)
        notes.add("http.disconnect")

    yield patch.object(service.Service, "answer", noted_answer)
    yield patch.object(client.EngineClient, "encode", noted_encode)
    yield patch.object(client.EngineClient, "_send", noted_send)
    yield patch.object(client.EngineClient, "_take", noted_take)
    yield patch.object(answer.Answer, "read", noted_read)
    yield patch.object(live.Live, "events", noted_events)
    yield patch.object(live, "_hung_up", noted_hung_up)


def clients(address: tuple[str, int], path: Path) -> None:
    """The one who asks, run after run."""
    notes = Notes(path, "client")
    try:
        while not serving(address):
            time.sleep(0.1)
        for name, (question, tokens, pieces) in {"warm": (WARM, 4, 0), **RUNS}.items():
            body = {"messages": [{"role": "user", "content": question}], "max_tokens": tokens, "ignore_eos": True}
            notes.add("asks", run=name)
            packets = ask(address, body)
            times = list[float]()
            for now, packet in packets:
                found = re.findall(r"^data: (.*)\n\n", packet.decode().replace("\r\n", "\n"), re.MULTILINE)
                if not packet or not found:
                    continue
                chunks = [json.loads(line) for line in found if line != "[DONE]"]
                text = "".join(c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"])
                notes.add("reads", text=text, done="[DONE]" in found)
                times.append(now)
                if pieces and len(times) == pieces:
                    time.sleep(0.4 * (times[-1] - times[-2]))  # into the step that makes the next one
                    notes.add("hangs up")
                    packets.close()
                    break
            time.sleep(1.0)  # what comes late
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def record(model: str) -> dict[str, Any]:
    """Serve, ask, and gather the notes: the events of each run, in milliseconds from its client's asking."""
    # By a name that another process can import, which __main__ is not.
    from benchmarks.players.request import noted_process

    config = EngineConfig(model=model, device="cpu", kv_pages=200)
    with TemporaryDirectory() as folder, own_port() as listener:
        path = Path(folder, "notes")
        patches = [*noted_front(Notes(path, "front")), patch.object(client, "run", partial(noted_process, path))]
        threading.Thread(target=clients, args=(listener.getsockname(), path), daemon=True).start()
        for each in patches:
            each.start()
        try:
            asyncio.run(serve._serve(config, ServerConfig(), listener, []))
        finally:
            for each in patches:
                each.stop()
        notes = sorted(map(json.loads, path.read_text().splitlines()), key=lambda note: note["at"])
    begins = {note["run"]: i for i, note in enumerate(notes) if note["what"] == "asks"}
    ends = [*list(begins.values())[1:], len(notes)]
    runs = {}
    for (name, begin), end in zip(begins.items(), ends, strict=True):
        zero, own = notes[begin]["at"], [note for note in notes[begin:end] if note["what"] != "takes Stop"]
        runs[name] = [{"ms": round(1000 * (note.pop("at") - zero), 2)} | note for note in own]
    return {
        "runs": {
            name: {"question": question, "max_tokens": tokens, "events": runs[name]}
            for name, (question, tokens, _) in RUNS.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--name", default="player_request", help="of the result file (default: %(default)s)")
    args = parser.parse_args()
    hub.resolve(args.model)  # here, where a download can be seen
    print(save(args.name, record(args.model)))


if __name__ == "__main__":
    main()
