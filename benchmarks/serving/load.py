"""When requests are sent: open loop, closed loop, or all at once. Knows no statistics.

Open loop: conversations begin at times drawn before, whatever the server does, and a request that the client sends late
counts from when it should have been sent. Closed loop: so many clients, each with its next conversation when the last
one is over; a slow server is asked less. The turns of a conversation wait for each other.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter, thread_time
from typing import Any

import aiohttp

from benchmarks.serving.client import Sample, Server, ask, read
from benchmarks.serving.workloads import Conversation, arrivals, as_text

TICK_S = 0.05  # how often the event loop's lag is measured


@dataclass(frozen=True)
class Load:
    """At most one of the two; with neither, all conversations begin at once."""

    rate: float = 0.0  # conversations a second
    concurrency: int = 0

    def __str__(self) -> str:
        if self.rate:
            return f"rate {self.rate:g}"
        return f"concurrency {self.concurrency}" if self.concurrency else "all at once"


@dataclass
class Pass:
    """All requests of a pass, and how the client fared."""

    samples: list[Sample] = field(default_factory=list)
    start: float = 0.0
    lags_s: list[float] = field(default_factory=list)  # how late the event loop was, each TICK_S
    busy: float = 0.0  # share of the time that the client's thread computed

    @property
    def seconds(self) -> float:
        return max((sample.ended for sample in self.samples), default=self.start) - self.start


async def run(
    http: aiohttp.ClientSession,
    server: Server,
    conversations: Sequence[Conversation],
    load: Load,
    seed: int = 0,
    done: Callable[[], object] = lambda: None,
) -> Pass:
    """Hold all conversations.

    Args:
        seed: of the arrivals and, with the request's number, of the answers.
        done: called behind each request.
    """
    found = Pass()
    seeds = iter(range(sum(map(len, conversations))))
    prepared = [_first(server, turns, [next(seeds) for _ in turns]) for turns in conversations]

    def talk(i: int, planned: float) -> Awaitable[None]:
        body, own = prepared[i]
        return _converse(http, server, conversations[i], body, own, planned, found.samples.append, done)

    with _quiet_garbage():
        found.start, computed = perf_counter(), thread_time()
        watch = asyncio.create_task(_watch(found.lags_s))
        try:
            await _all(talk, len(conversations), load, found.start, seed)
        finally:
            watch.cancel()
        found.busy = (thread_time() - computed) / (perf_counter() - found.start)
    for sample in found.samples:
        read(sample, server.stream)
    return found


async def _all(talk: Callable[[int, float], Awaitable[None]], number: int, load: Load, start: float, seed: int) -> None:
    if load.concurrency:
        left = iter(range(number))

        async def client() -> None:
            for i in left:
                await talk(i, perf_counter())

        await asyncio.gather(*(client() for _ in range(min(number, load.concurrency))))
        return
    tasks = []
    for i, at in enumerate(arrivals(number, load.rate, seed) if load.rate else [0.0] * number):
        if (wait := start + at - perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.ensure_future(talk(i, start + at)))
    await asyncio.gather(*tasks)


def _first(server: Server, turns: Conversation, seeds: list[int]) -> tuple[bytes, list[int]]:
    """The body of a conversation's first request, made before the clock runs, and the seeds of all its requests."""
    return server.body(_prompt(server, turns, []), turns[0].max_tokens, seeds[0]), seeds


def _prompt(server: Server, turns: Conversation, answers: list[str]) -> Any:
    """What was said so far and what is new: messages, or a text; token ids, where nothing was answered yet."""
    if server.token_ids and len(turns) == 1:
        return turns[0].tokens
    said = [as_text(turn.tokens) for turn in turns[: len(answers) + 1]]
    if not server.chat:
        return "".join(text for pair in zip(said, [*answers, ""], strict=True) for text in pair)
    messages = [{"role": "user", "content": said[0]}]
    for answer, new in zip(answers, said[1:], strict=True):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": new}]
    return messages


async def _converse(
    http: aiohttp.ClientSession,
    server: Server,
    turns: Conversation,
    body: bytes,
    seeds: list[int],
    planned: float,
    keep: Callable[[Sample], object],
    done: Callable[[], object],
) -> None:
    """One turn after the other; a failed one ends the conversation, and those behind it are counted as not sent."""
    answers: list[str] = []
    for i, (turn, seed) in enumerate(zip(turns, seeds, strict=True)):
        if i:
            body = server.body(_prompt(server, turns, answers), turn.max_tokens, seed)
            await asyncio.sleep(turn.think_s)
            planned = perf_counter()
        keep(sample := Sample(turn.max_tokens, planned))
        await ask(http, server, body, sample)
        done()
        if i + 1 < len(turns):
            answers.append(read(sample, server.stream).text)
            if sample.error:
                for late in turns[i + 1 :]:
                    keep(Sample(late.max_tokens, planned, sample.ended, sample.ended, error="not sent: a turn failed"))
                    done()
                return


async def _watch(lags: list[float]) -> None:
    while True:
        due = perf_counter() + TICK_S
        await asyncio.sleep(TICK_S)
        lags.append(max(0.0, perf_counter() - due))


@contextmanager
def _quiet_garbage() -> Iterator[None]:
    """No collection while the clock runs: with torch imported, one takes a tenth of a second."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
