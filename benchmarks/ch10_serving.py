"""What chapter 10 shows of a server, recorded with SmolLM2 on a CPU. Each part can be made anew by its name.

- stream: the bytes of a streamed chat as its client's socket received them, with the time of each piece.
- abort: what client, front and engine's process did when a client hung up in the middle of a step, on one clock.
- curve: latency and throughput at several rates of an open loop, with `minisgl bench serve`'s client.

  python -m benchmarks.ch10_serving              # all
  python -m benchmarks.ch10_serving curve --rates 1 2 4 8
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Generator
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import minisgl_hub as hub

from benchmarks import record
from benchmarks.serve import WARM_SEED, point
from benchmarks.serving import options, own, report
from benchmarks.serving.client import Server, discover, session
from benchmarks.serving.load import Load, Pass, run
from benchmarks.serving.workloads import draw
from minisgl.config import EngineConfig
from minisgl.core import Request
from minisgl.distributed.ranks import Seat
from minisgl.message import messages as m
from minisgl.server import client, engine_process, live, serve
from minisgl.server.config import ServerConfig

PARTS = ("stream", "abort", "curve")
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
LONG = "Count from one to a hundred in words, one number a line, and say nothing else at all. " * 6
INPUT, OUTPUT = [16, 48], [12, 20]  # tokens of the curve's prompts and answers: the fewest and the most
SLO = "ttft=1s"
PACKET = 2**16  # bytes that are read at once


def ask(address: tuple[str, int], body: dict[str, Any]) -> Generator[tuple[float, bytes], None, None]:
    """Post a chat; yield what the socket has, each time with the time; first the moment of asking, without bytes.

    Closing the iterator hangs up.
    """
    data = json.dumps({"model": "smollm2", "temperature": 0, "stream": True} | body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address[0]}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(address) as connection:
        connection.sendall(head.encode() + data)
        yield time.perf_counter(), b""
        while piece := connection.recv(PACKET):
            yield time.perf_counter(), piece


# The stream


def stream(args: argparse.Namespace) -> dict[str, Any]:
    """A short answer, asked for twice, and recorded the second time."""
    body = {"messages": QUESTION, "max_tokens": 12, "stream_options": {"include_usage": True}}
    with own.running(["--device", "cpu"]) as url:
        parts = urlsplit(url)
        address = (str(parts.hostname), int(parts.port or 0))
        for _ in range(2):
            [(start, _), *packets] = ask(address, body)
    return {
        "body": body,
        "packets": [{"ms": 1000 * (now - start), "bytes": packet.decode("latin-1")} for now, packet in packets],
    }


# The abort


class Notes:
    """What happened when, by time.perf_counter, which is one clock for all processes of a machine (on Linux).

    Args:
        path: lines of JSON; several processes may write there.
    """

    def __init__(self, path: Path, who: str) -> None:
        self.who, self._file = who, path.open("a", buffering=1)

    def add(self, what: str, **more: Any) -> None:
        self._file.write(json.dumps({"at": time.perf_counter(), "who": self.who, "what": what} | more) + "\n")


class Noted(engine_process.Server):
    """The engine's loop, which notes the messages that it takes, its steps, and what it tells."""

    def __init__(self, engine: Any, front: engine_process.Front, notes: Notes) -> None:
        super().__init__(engine, front)
        self.notes, plain = notes, engine.step

        def step() -> list[Request]:
            self.notes.add("step begins")
            got: list[Request] = plain()
            self.notes.add("step ends")
            return got

        engine.step = step

    def _take(self, message: m.ToEngine) -> None:
        self.notes.add(type(message).__name__, id=getattr(message, "id", None))
        super()._take(message)

    def _tell(self, requests: list[Request]) -> None:
        told = [[request.id, request.finish_reason] for request in requests]
        self.notes.add("StepDone", outputs=told, pages_available=self._gauges().pages_available)
        super()._tell(requests)


def noted_process(path: Path, seat: Seat, config: EngineConfig, folder: Path, sockets: Path) -> None:
    """In place of engine_process.run."""
    with patch.object(engine_process, "Server", partial(Noted, notes=Notes(path, "engine"))):
        engine_process.run(seat, config, folder, sockets)


def hang_up(address: tuple[str, int], path: Path) -> None:
    """The clients: one that stays, and one that goes in the middle of a step, after its sixth piece."""
    notes = Notes(path, "client")
    try:
        while not serving(address):
            time.sleep(0.1)
        stays = ask(address, {"messages": QUESTION, "max_tokens": 60, "ignore_eos": True})
        goes = ask(address, {"messages": [{"role": "user", "content": LONG}], "max_tokens": 200, "ignore_eos": True})
        for pieces in (stays, goes):
            next(pieces)
        times = []
        for now, _ in goes:
            times.append(now)
            if len(times) == 7:  # the first is the response's head
                break
        time.sleep(0.4 * (times[-1] - times[-2]))  # into the step that makes the next one
        notes.add("hangs up")
        goes.close()
        for _ in stays:
            pass
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def serving(address: tuple[str, int]) -> bool:
    """Whether the model is loaded."""
    with suppress(OSError), socket.create_connection(address) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
        return b" 200 " in connection.recv(PACKET)
    return False


def abort(args: argparse.Namespace) -> dict[str, Any]:
    """A real server in this process, whose front and engine note what they do."""
    # By a name that another process can import, which __main__ is not.
    from benchmarks.ch10_serving import noted_process

    with TemporaryDirectory() as folder, own_port() as listener:
        path, address = Path(folder, "notes"), listener.getsockname()
        notes = Notes(path, "front")
        hung_up, send, take = live._hung_up, client.EngineClient._send, client.EngineClient._take

        async def noted_hung_up(receive: Any) -> None:
            await hung_up(receive)
            notes.add("http.disconnect")

        def noted_send(self: client.EngineClient, data: bytes) -> None:
            message = m.decode_to_engine(data)
            if isinstance(message, m.Submit | m.Abort) and message.id in self._open:
                notes.add(type(message).__name__, id=message.id)
            send(self, data)

        def noted_take(self: client.EngineClient, message: m.FromEngine) -> None:
            if isinstance(message, m.StepDone):
                notes.add("StepDone", outputs=[[output.id, output.finish_reason] for output in message.outputs])
            take(self, message)

        threading.Thread(target=hang_up, args=(address, path), daemon=True).start()
        with (
            patch.object(client, "run", partial(noted_process, path)),
            patch.object(client.EngineClient, "_send", noted_send),
            patch.object(client.EngineClient, "_take", noted_take),
            patch.object(live, "_hung_up", noted_hung_up),
        ):
            config = EngineConfig(device="cpu", kv_pages=200)
            asyncio.run(serve._serve(config, ServerConfig(), listener, []))
        events = sorted(map(json.loads, path.read_text().splitlines()), key=lambda event: event["at"])
    zero = next(event["at"] for event in events if event["what"] == "hangs up")
    about = [event | {"at": 1000 * (event["at"] - zero)} for event in events]
    ended = next(e["at"] for e in about if any(reason == "abort" for _, reason in e.get("outputs", ())))
    begins = [event["at"] for event in about if event["what"] == "step begins"]
    first = max(at for at in begins if at < 0)
    first = max(at for at in begins if at < first)
    shown = [event for event in about if first <= event["at"] <= ended + 2 * -first]
    return {"events": [{"ms": event.pop("at")} | event for event in shown]}


def own_port() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


# The curve


async def measured(url: str, args: argparse.Namespace) -> dict[str, Any]:
    """Medians by rate. A pass goes through all rates, so that a busy minute does not fall on one of them only."""
    plain = options.parser(None).parse_args(["--workload", "random", "--url", url, "--slo", SLO])
    options.check(plain)
    plain.input, plain.output = INPUT, OUTPUT
    passes: dict[float, list[Pass]] = {rate: [] for rate in args.rates}
    async with session(0.0) as http:
        asked = await discover(http, Server(url), plain.vocabulary)
        plain.requests = 8
        await run(http, asked, draw(plain, WARM_SEED), Load(), WARM_SEED)
        for i in range(args.passes):
            for rate, found in passes.items():
                plain.requests, seed = max(8, round(rate * args.seconds)), len(found) + round(100 * rate)
                found.append(await run(http, asked, draw(plain, seed), Load(rate=rate), seed))
                print(
                    "\n".join(report.lines(f"pass {i}, rate {rate:g}", report.summary(found[-1], plain.slo))),
                    flush=True,
                )
    points = {rate: {"rate": rate} | point(found, plain.slo) for rate, found in passes.items()}
    for each in points.values():
        del each["passes"]
    return {f"{rate:g}".replace(".", "_"): each for rate, each in points.items()}  # a page's path is cut at dots


def curve(args: argparse.Namespace) -> dict[str, Any]:
    """Throughput and latency against the rate at which requests come."""
    flags = ["--device", "cpu", "--max-running-requests", str(args.running)]
    with own.running(flags) as url:
        points = asyncio.run(measured(url, args))
    return {
        "input": INPUT,
        "output": OUTPUT,
        "max_running_requests": args.running,
        "slo": SLO,
        "seconds": args.seconds,
        "passes": args.passes,
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],  # of this machine, what is measured included
        "points": points,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 1, 2, 3, 4, 6], help="a second")
    parser.add_argument("--seconds", type=float, default=8, help="of requests at each rate (default: %(default)s)")
    parser.add_argument("--passes", type=int, default=3, help="medians count (default: %(default)s)")
    parser.add_argument("--running", type=int, default=16, help="answers side by side (default: %(default)s)")
    parser.add_argument("--name", default="ch10_serving", help="of the result file (default: %(default)s)")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"there is no part {unknown.pop()}: choose of {', '.join(PARTS)}")
    hub.resolve("smollm2")  # here, where a download can be seen
    data: dict[str, Any] = {}
    with suppress(FileNotFoundError):
        data = record.load(args.name)["data"]
    makers = {"stream": stream, "abort": abort, "curve": curve}
    for part in args.parts or PARTS:
        data[part] = makers[part](args)
    print(record.save(args.name, data))


if __name__ == "__main__":
    main()
