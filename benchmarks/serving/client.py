"""Requests to an OpenAI server, with the time at which each piece of an answer came. Knows no workload.

Pieces are kept as bytes while they come and read when the run is over: whatever a client computes in between delays the
time that it takes down for the next piece.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import aiohttp
import msgspec

from minisgl.server.remote import error_message


@dataclass(frozen=True)
class Server:
    """Where to ask, for what, and which extensions of OpenAI's API it takes.

    Args:
        chat: ask /v1/chat/completions, not /v1/completions.
        stream: answers come in pieces.
        token_ids: prompts may be lists of token ids.
        ignore_eos: answers can be made as long as asked for.
        counts: each piece says how many tokens came so far (stream_options.continuous_usage_stats).
    """

    url: str
    key: str = ""
    model: str = ""
    chat: bool = False
    stream: bool = True
    temperature: float = 0.6
    token_ids: bool = False
    ignore_eos: bool = False
    counts: bool = False

    @property
    def headers(self) -> dict[str, str]:
        plain = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        return plain | ({"Authorization": f"Bearer {self.key}"} if self.key else {})

    @property
    def path(self) -> str:
        return self.url + ("/v1/chat/completions" if self.chat else "/v1/completions")

    def body(self, prompt: Any, max_tokens: int, seed: int) -> bytes:
        """A request: prompt is a text, a list of token ids, or with chat a list of messages."""
        asked = {"model": self.model, "max_tokens": max_tokens, "temperature": self.temperature, "seed": seed}
        asked["messages" if self.chat else "prompt"] = prompt
        if self.ignore_eos:
            asked["ignore_eos"] = True
        if self.stream:
            counts = {"continuous_usage_stats": True} if self.counts else {}
            asked |= {"stream": True, "stream_options": {"include_usage": True} | counts}
        return msgspec.json.encode(asked)


@dataclass
class Sample:
    """What became of one request. Times are in seconds of time.perf_counter."""

    max_tokens: int
    planned: float  # when it should have been sent
    started: float = 0.0
    finished: float = 0.0  # when the finish reason came
    ended: float = 0.0
    error: str = ""  # its kind
    detail: str = ""
    finish_reason: str = ""
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    times: list[float] = field(default_factory=list)  # of the pieces with text
    counts: list[int] = field(default_factory=list)  # tokens of the answer up to each piece; 0 where it does not say
    arrived: list[tuple[float, bytes]] = field(default_factory=list)  # unread bytes


def session(timeout_s: float) -> aiohttp.ClientSession:
    """Without a limit of connections: a request never waits for another one's."""
    timeout = aiohttp.ClientTimeout(total=timeout_s or None)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout, read_bufsize=2**20)


async def ask(http: aiohttp.ClientSession, server: Server, body: bytes, sample: Sample) -> None:
    """Send a request and keep what comes; what goes wrong becomes the sample's error."""
    sample.started = perf_counter()
    try:
        async with http.post(server.path, data=body, headers=server.headers) as reply:
            if reply.status != 200:
                sample.error, sample.detail = f"HTTP {reply.status}", error_message(await reply.read())
            else:
                while piece := await reply.content.readany():
                    sample.arrived.append((perf_counter(), piece))
    except asyncio.TimeoutError:
        sample.error = "timeout"
    except aiohttp.ClientConnectorError as error:
        sample.error, sample.detail = "no connection", _reason(error)
    except (aiohttp.ClientError, OSError) as error:
        sample.error, sample.detail = "connection lost", str(error)
    sample.ended = perf_counter()


def _reason(error: Exception) -> str:
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)


class _Words(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Words | None = None
    message: _Words | None = None
    finish_reason: str | None = None

    @property
    def words(self) -> str:
        said = self.delta or self.message
        return (said.reasoning_content or "") + (said.content or "") if said else self.text or ""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Reply).decode


def read(sample: Sample, stream: bool) -> Sample:
    """Take the bytes that came apart: text, tokens, times. Tokens are the server's count, never that of its pieces."""
    arrived, sample.arrived = sample.arrived, []
    if sample.error or sample.finish_reason:  # nothing came, or it was read
        return sample
    usage, words, ended = None, list[str](), not stream
    try:
        for now, data in _events(arrived) if stream else [(sample.ended, b"".join(piece for _, piece in arrived))]:
            if data == b"[DONE]":
                ended = True
                continue
            reply = _decode(data)
            if reply.error:
                sample.error, sample.detail = "error in the stream", error_message(data)
                return sample
            usage = reply.usage or usage
            for choice in reply.choices:
                if stream and choice.words:
                    sample.times.append(now)
                    sample.counts.append(reply.usage.completion_tokens if reply.usage else 0)
                if choice.finish_reason:
                    sample.finish_reason, sample.finished = choice.finish_reason, now
                words.append(choice.words)
    except msgspec.DecodeError as error:
        sample.error, sample.detail = "not understood", str(error)
        return sample
    sample.text = "".join(words)
    if not ended or not sample.finish_reason:
        sample.error = "cut off"
    elif sample.finish_reason in ("abort", "error"):
        sample.error = "aborted"
    elif usage is None:
        sample.error = "no usage"
    else:
        sample.prompt_tokens, sample.output_tokens = usage.prompt_tokens, usage.completion_tokens
        sample.cached_tokens = (usage.prompt_tokens_details or _Details()).cached_tokens or 0
        if stream:
            _close(sample)
    return sample


def _close(sample: Sample) -> None:
    """Tokens without text of their own may end an answer: the last piece is not before the finish reason's."""
    if len(sample.times) > 1:
        sample.times[-1], sample.counts[-1] = sample.finished, sample.output_tokens
    elif not sample.times or sample.output_tokens > 1:
        sample.times.append(sample.finished)
        sample.counts.append(sample.output_tokens)


def _events(arrived: Sequence[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """What stands behind each `data:` of a stream, with the time when its line was complete."""
    events, rest = [], b""
    for now, piece in arrived:
        *lines, rest = (rest + piece).split(b"\n")
        events += [(now, line[5:].strip()) for line in lines if line.startswith(b"data:")]
    return events


async def discover(http: aiohttp.ClientSession, server: Server, vocabulary: int) -> Server:
    """Find the model's name, unless it is given, and try which extensions the server takes.

    Args:
        vocabulary: token ids below it will be sent.

    Raises:
        ValueError: it is no OpenAI server, or refuses a plain request.
    """
    if not server.model:
        server = replace(server, model=await _first_model(http, server))
    plain = "Hello"
    await _try(http, server, plain, needed=True)
    ids = not server.chat and await _try(http, server, [vocabulary - 1])
    server = replace(server, token_ids=bool(ids))
    if await _try(http, replace(server, ignore_eos=True), plain):
        server = replace(server, ignore_eos=True)
    found = await _try(http, replace(server, counts=True), plain) if server.stream else None
    return replace(server, counts=bool(found and found.counts and found.counts[0]))


async def _first_model(http: aiohttp.ClientSession, server: Server) -> str:
    try:
        async with http.get(server.url + "/v1/models", headers=server.headers) as reply:
            body = await reply.read()
            if reply.status != 200:
                raise ValueError(f"{server.url}/v1/models answers {reply.status}: {error_message(body)}")
            return str(msgspec.json.decode(body)["data"][0]["id"])
    except (aiohttp.ClientError, OSError) as error:
        raise ValueError(f"no server answers at {server.url}: {_reason(error)}") from None
    except (msgspec.DecodeError, LookupError, TypeError):
        raise ValueError(f"{server.url}/v1/models lists no model: is this an OpenAI server?") from None


async def _try(http: aiohttp.ClientSession, server: Server, prompt: Any, needed: bool = False) -> Sample | None:
    messages = [{"role": "user", "content": prompt}]
    sample = Sample(2, perf_counter())
    await ask(http, server, server.body(messages if server.chat else prompt, 2, 0), sample)
    if not read(sample, server.stream).error:
        return sample
    if needed:
        raise ValueError(f"{server.path} cannot be measured: {sample.error}. {sample.detail}".rstrip(" ."))
    return None
