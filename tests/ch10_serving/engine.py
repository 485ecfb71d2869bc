"""The engine process's loop around a tiny model, in this process, with a front that writes down what it is sent."""

from __future__ import annotations

from typing import Any

from minisgl.config import EngineConfig
from minisgl.core import Request, SamplingParams
from minisgl.engine.engine import Engine
from minisgl.message import messages as m
from minisgl.server.engine_process import Server
from tests.helpers import tiny_model

LONG = SamplingParams(max_tokens=6, ignore_eos=True)
MODEL = tiny_model()


class Front:
    """Hands out one batch of messages at a time, each when the loop looks for some."""

    def __init__(self, *batches: list[m.ToEngine]) -> None:
        self.batches, self.sent, self.log = list(batches), list[Any](), list[str]()
        self.engine: Engine | None = None
        self._waited = False

    def send(self, message: m.FromEngine) -> None:
        self.sent.append(m.decode_from_engine(m.encode(message)))
        self.log.append(type(message).__name__)

    def wait(self, timeout_ms: int | None = None) -> None:
        assert self.engine is not None
        assert not self.engine.has_work, "the loop waits for messages while there is work to do"
        assert timeout_ms is not None, "who waits without a limit never sees that another rank has died"
        assert timeout_ms > 0, "who does not wait at all keeps a core busy for nothing"
        self._waited = True

    def messages(self) -> list[m.ToEngine]:
        assert self.engine is not None
        assert self._waited or self.engine.has_work, "the loop goes round and round although nobody asks for anything"
        self._waited = False
        self.log.append("look")
        return self.batches.pop(0) if self.batches else [] if self.engine.has_work else [m.Stop()]


def new_server(*batches: list[m.ToEngine], **config: Any) -> Server:
    switches = {"kv_pages": 40, "page_size": 4, "attention": "torch", "kernels": "torch", "overlap": "off"} | config
    engine = Engine(MODEL, EngineConfig(graphs="off", **switches))
    front = Front(*batches)
    front.engine = engine
    return Server(engine, front)  # type: ignore[arg-type]


def asks(request_id: int, tokens: list[int], params: SamplingParams = LONG) -> m.Submit:
    return m.Submit(request_id, tokens, params, 0, [])


def submit(server: Server, request_id: int, tokens: list[int], params: SamplingParams = LONG) -> Request:
    """Hand a request in as the loop does; the engine's own, to compare with."""
    held: list[Request] = []
    add = server.engine.add

    def note(request: Request, refusal: str = "") -> None:
        held.append(request)
        add(request, refusal)

    server.engine.add = note  # type: ignore[method-assign]
    server._take(asks(request_id, tokens, params))
    server.engine.add = add  # type: ignore[method-assign]
    return held[0]
