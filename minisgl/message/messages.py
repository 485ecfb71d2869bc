"""What travels between the front of a server and its engine process: ids and numbers, never text.

Tagged unions of msgspec's structs, which are encoded as arrays and checked when they are decoded.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import msgspec

from minisgl.core import FinishReason, Request, SamplingParams, TokenLogprobs


class Message(msgspec.Struct, tag=True, array_like=True):
    """The base of all: its tag is the name of the class."""


# To the engine.


class Submit(Message):
    """A request. Whoever submits it gives the id."""

    id: int
    tokens: list[int]
    params: SamplingParams
    seed: int
    stop_ids: list[int]

    def request(self) -> Request:
        return Request(self.id, self.tokens, self.params, frozenset(self.stop_ids), seed=self.seed)


class Abort(Message):
    """End a request, with this as its finish reason."""

    id: int
    reason: FinishReason = "abort"


class AskStats(Message):
    """Answered by Stats with the same id."""

    id: int


class Watch(Message):
    """Send trace events from the next step on, under this id; or no longer."""

    id: int
    on: bool


class Stop(Message):
    """Abort what is open, and end."""


# From the engine.


class Gauges(msgspec.Struct, array_like=True):
    """The engine's state after a step, and its counts since it began."""

    running: int = 0
    waiting: int = 0
    pages: int = 0
    pages_available: int = 0  # free, or held by the prefix cache only
    pages_cached: int = 0  # held by the prefix cache
    steps: int = 0
    tokens_computed: int = 0
    tokens_reused: int = 0  # prompt tokens found in the prefix cache
    preemptions: int = 0


class Ready(Message):
    """The engine takes requests from now on."""

    device: str
    max_len: int  # tokens of the longest sequence, answer included
    vocab_size: int
    eos_token_ids: list[int]
    gauges: Gauges


class Refused(Message):
    """There is no engine: the model or the config will not do."""

    reason: str


class Stage(Message):
    """What the engine process does from now on, while it starts."""

    doing: str


class Output(Message):
    """What a request got since it was last told about."""

    id: int
    tokens: list[int]
    finish_reason: FinishReason | None = None
    error: str = ""  # why, when finish_reason is "error"
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    logprobs: list[TokenLogprobs] = []


class StepDone(Message):
    """One step's outputs, all in one message."""

    outputs: list[Output]
    gauges: Gauges


class Stats(Message):
    id: int
    values: dict[str, float]


class Event(Message):
    """A trace event, one line of JSON, for the watcher of this id."""

    id: int
    line: str


ToEngine = Submit | Abort | AskStats | Watch | Stop
FromEngine = StepDone | Stats | Event | Ready | Refused | Stage

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def submissions(
    ids: Iterator[int], tokens: Sequence[int], params: SamplingParams, eos_token_ids: Sequence[int]
) -> Iterator[Submit]:
    """The params.n requests of one prompt, with seeds that follow each other; ids gives theirs."""
    stop_ids = [*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)]
    first_seed = random.getrandbits(62) if params.seed is None else params.seed
    for i in range(params.n):
        yield Submit(next(ids), list(tokens), params, (first_seed + i) % 2**63, stop_ids)


def news(request: Request, known: int) -> Output:
    """What a request has got beyond the first `known` tokens of its answer."""
    return Output(
        request.id,
        request.tokens[request.prompt_len + known :],
        request.finish_reason,
        request.error,
        request.num_cached,
        request.logprobs[known:],
    )
