"""What stands around the tested function: a tokenizer, a connection, an engine's answers, and a reader of streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from tests.tiny_tokenizer import byte_level_tokenizer

BYTES = byte_level_tokenizer()
EOS = 0


def ids(text: str) -> list[int]:
    """One token a byte."""
    return BYTES(text)["input_ids"]


class Counting:
    """A tokenizer that counts the ids which it decodes."""

    def __init__(self, tokenizer: Any = BYTES) -> None:
        self.tokenizer, self.calls, self.decoded = tokenizer, 0, 0

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        self.calls += 1
        self.decoded += len(token_ids)
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


def cut(items: Sequence[Any], lengths: Iterable[int]) -> list[Any]:
    """The items in pieces of these lengths, and what is left in one more."""
    pieces, at = [], 0
    for length in lengths:
        pieces.append(items[at : at + length])
        at += length
    return [*pieces, items[at:]]


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run it to its end, and leave nothing running behind it. What hangs is an error."""

    async def alone() -> Any:
        result = await asyncio.wait_for(main, 20)
        await settled()
        left = [task.get_coro() for task in asyncio.all_tasks() - {asyncio.current_task()}]
        assert not left, f"still running at the end: {left}"
        return result

    return asyncio.run(alone())


async def settled() -> None:
    """Let all that can go on do so."""
    for _ in range(20):
        await asyncio.sleep(0)


class Connection:
    """An HTTP client without a network: what an ASGI app receives from it and sends to it."""

    def __init__(self, body: Any = None) -> None:
        self.status, self.sent, self.ended = 0, [], False
        self._gone = asyncio.Event()
        self._body = None if body is None else json.dumps(body).encode()

    def hang_up(self) -> None:
        self._gone.set()

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        assert not self.ended, "something is sent behind the end"
        if message["type"] == "http.response.start":
            assert not self.status, "two responses to one request"
            self.status = message["status"]
        else:
            assert self.status, "a body before its headers"
            self.sent.append(message.get("body", b""))
            self.ended = not message.get("more_body", False)

    @property
    def body(self) -> bytes:
        return b"".join(self.sent)


def events(stream: bytes) -> list[Any]:
    """The data of a stream's server-sent events, as a browser takes them; JSON is read, [DONE] stays a text."""
    text, found, data = stream.decode(), [], []
    for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")[:-1]:
        name, _, value = line.partition(":")
        if not line and data:  # an empty line ends an event
            found.append("\n".join(data))
            data = []
        elif line:
            assert name == "data", f"a line that is no data: {line!r}"
            data.append(value.removeprefix(" "))
    assert not data, f"an event without an empty line behind it never comes: {data}"
    return [value if value == "[DONE]" else json.loads(value) for value in found]


class Sent:
    """In place of Live: keeps what is sent, call by call, and whether it was the last."""

    def __init__(self, on_send: Callable[[], Any] = lambda: None) -> None:
        self.sent, self.ended, self._on_send = list[bytes](), False, on_send

    async def events(self, data: bytes, last: bool = False) -> None:
        assert not self.ended, "something is sent behind the end"
        self.sent.append(data)
        self.ended = last
        self._on_send()

    @property
    def events_sent(self) -> list[Any]:
        return events(b"".join(self.sent))
