"""What the routes do: from prompts to answers, within limits. Knows HTTP only by its statuses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

from minisgl.core import FinishReason, SamplingParams
from minisgl.message.messages import Gauges
from minisgl.server.client import AnswerStream, EngineClient, Piece
from minisgl.server.config import ServerConfig
from minisgl.server.errors import ApiError
from minisgl.server.live import Live
from minisgl.server.metrics import Metrics
from minisgl.server.protocol import Sampling
from minisgl.server.replies import DONE, CompletionReply
from minisgl.server.words import Words
from minisgl.tokenizer.answer import Completion
from minisgl.tokenizer.encode import Prompt

STARTING, STOPPING = "the server is starting", "the server is stopping"


class Service:
    """An engine, once it is there, and those who wait for its answers."""

    def __init__(self, config: ServerConfig, model: str) -> None:
        self.config, self.model = config, config.served_model_name or model
        self.closed = STARTING  # why nothing is answered now, if so
        self.created = int(time.time())
        self.metrics = Metrics(lambda: self._engine.gauges if self._engine else Gauges())
        self.num_held = 0  # answers asked for and not given, those whose prompts are still text included
        self._engine: EngineClient | None = None

    def open(self, engine: EngineClient) -> None:
        """Answer from now on."""
        self._engine, self.words, self.closed = engine, Words(engine.tokenizer), ""

    @property
    def state(self) -> str:
        """Why nothing is answered now; empty if all is well."""
        died = self._engine.dead if self._engine else ""
        return self.closed or (f"the engine is gone: {died.strip().splitlines()[0]}" if died else "")

    def engine(self, model: str | None = None) -> EngineClient:
        """The engine, for whoever asks for this model, or for any.

        Raises:
            ApiError: 503 or 404.
        """
        if self.state or not self._engine:
            raise ApiError(503, self.state, headers={"retry-after": "5"})
        if model not in (None, self.model):
            text = f"the model {model!r} does not exist here: this server has {self.model!r}"
            raise ApiError(404, text, "model", "model_not_found")
        return self._engine

    def answer(self, body: Sampling, prompts: Sequence[Prompt], reply: CompletionReply, usage: bool = False) -> Live:
        """The response to an answering route.

        Args:
            prompts: each gets body.n answers.
            reply: words them.
            usage: end a stream with the numbers of tokens.
        """
        engine = self.engine()
        params = body.params(engine.max_len)
        check_ids(engine, "logit_bias", params.logit_bias)
        check_ids(engine, "stop_token_ids", params.stop_token_ids)
        num = len(prompts) * params.n

        async def work(live: Live) -> None:
            begin, answers = time.perf_counter(), list[AnswerStream]()
            with self._hold(num):
                try:
                    tokens = [await encoded(engine, prompt) for prompt in prompts]
                    waited_s = time.perf_counter() - begin
                    for ids in tokens:
                        answers += engine.submit(ids, params, bool(body.stream))
                    if body.stream:
                        await self._stream(live, answers, reply, usage, waited_s)
                    else:
                        completions = [self._whole(await answer.finished(), waited_s) for answer in answers]
                        await live.json(reply.whole(completions))
                finally:
                    for answer in answers:
                        engine.abort(answer)

        def cut_off(reason: str) -> None:
            self.metrics.aborted[reason] += num

        return Live(work, self.config.request_timeout_s, cut_off)

    @contextmanager
    def _hold(self, num: int) -> Iterator[None]:
        """Places for answers in batch and queue."""
        running = self.engine().config.max_running_requests
        most = running + self.config.max_queue
        if num > most:
            text = f"prompts × n is {num:,}, but this server has room for {most:,} answers: ask for fewer at once"
            raise ApiError(400, text, "n", "invalid_value")
        if self.num_held + num > most:
            text = f"the queue is full: {running:,} answers may run and {self.config.max_queue:,} wait. Come back later"
            raise ApiError(429, text, code="queue_full", headers={"retry-after": "1"})
        self.num_held += num
        try:
            yield
        finally:
            self.num_held -= num

    async def _stream(
        self, live: Live, answers: Sequence[AnswerStream], reply: CompletionReply, usage: bool, waited_s: float
    ) -> None:
        """Send what comes as it comes, and the usage, and [DONE]."""
        begin, last = time.perf_counter(), [0.0] * len(answers)  # when the token before came
        async with aclosing(_merged(answers)) as pieces:
            async for i, piece, reason in pieces:
                now, num = time.perf_counter(), len(piece.token_ids)
                self.metrics.generation_tokens += num
                data = reply.piece(i, *piece)
                if not last[i]:
                    data = reply.opening(i) + data
                    last[i], num = begin + answers[i].completion.first_token_s, num - 1
                if num > 0:
                    self.metrics.between.observe((now - last[i]) / num, num)
                last[i] = now
                if reason:
                    _require_whole(completion := answers[i].completion)
                    self.metrics.ended(completion, waited_s, streamed=True)
                    data += reply.ending(i, reason)
                if data:
                    await live.events(data)
        end = reply.closing([answer.completion for answer in answers]) if usage else b""
        await live.events(end + DONE, last=True)

    def _whole(self, completion: Completion, waited_s: float) -> Completion:
        _require_whole(completion)
        self.metrics.generation_tokens += len(completion.token_ids)
        self.metrics.ended(completion, waited_s, streamed=False)
        return completion

    def watch(self) -> Live:
        """The engine's trace as server-sent events."""
        engine = self.engine()

        async def work(live: Live) -> None:
            async with aclosing(engine.watch()) as lines:  # type: ignore[type-var]
                async for line in lines:
                    await live.events(f"data: {line}\n\n".encode())
            await live.events(b"", last=True)

        return Live(work)

    async def stats(self) -> dict[str, Any]:
        """The engine's work and the front's counts."""
        engine, metrics = self.engine(), self.metrics
        gauges = engine.gauges
        own = {
            "model": self.model,
            "device": engine.device,
            "max_len": engine.max_len,
            "uptime_s": time.time() - self.created,
            "running": gauges.running,
            "waiting": gauges.waiting,
            "held": self.num_held,
            "pages": gauges.pages,
            "pages_available": gauges.pages_available,
            "pages_cached": gauges.pages_cached,
            "prompt_tokens": metrics.prompt_tokens,
            "cached_tokens": metrics.cached_tokens,
            "generation_tokens": metrics.generation_tokens,
            "generation_tokens_per_s": metrics.tokens_per_s,
        }
        return await engine.stats() | own

    async def compute(self, engine: EngineClient, prompt: Prompt, params: SamplingParams) -> Completion:
        """A prompt of the server's own.

        Raises:
            ValueError: it cannot be served.
        """
        completion = await engine.submit(await engine.encode(prompt), params)[0].finished()
        if completion.error:
            raise ValueError(completion.error)
        return completion


async def encoded(engine: EngineClient, prompt: Prompt, param: str = "") -> list[int]:
    """Token ids of a client's prompt.

    Raises:
        ApiError: 400: it cannot be encoded, or does not fit.
    """
    param = param or ("messages" if not isinstance(prompt, str) and isinstance(prompt[0], dict) else "prompt")
    try:
        ids = await engine.encode(prompt)
    except ValueError as error:
        raise ApiError(400, str(error), param, "invalid_value") from None
    if not ids:
        raise ApiError(400, "the prompt is empty: give at least one token", param, "invalid_value")
    check_ids(engine, param, ids)
    if len(ids) >= engine.max_len:
        text = (
            f"a sequence may have at most {engine.max_len:,} tokens here, the answer included, but the prompt alone "
            f"has {len(ids):,}: shorten it"
        )
        raise ApiError(400, text, param, "context_length_exceeded")
    return ids


def check_ids(engine: EngineClient, param: str, ids: Any) -> None:
    """Raises ApiError if there is a token id that the model does not know; none of them is negative."""
    if ids and (largest := max(ids)) >= engine.vocab_size:
        text = f"{param} holds the token id {largest}, but this model's end at {engine.vocab_size - 1}"
        raise ApiError(400, text, param, "invalid_value")


def _require_whole(completion: Completion) -> None:
    """Raises ApiError if an answer did not end as answers should."""
    if completion.finish_reason == "abort":
        raise ApiError(503, f"{STOPPING}: the answer was cut off", code="aborted", headers={"retry-after": "5"})
    if completion.finish_reason == "error":
        raise ApiError(500, completion.error, code="engine_error")


async def _merged(answers: Sequence[AnswerStream]) -> AsyncGenerator[tuple[int, Piece, FinishReason | None], None]:
    """The pieces of several answers as they come, each with the answer's index and, the last one, its finish reason."""
    if len(answers) == 1:
        async for piece in answers[0]:
            yield 0, piece, answers[0].completion.finish_reason
        return
    queue = asyncio.Queue[tuple[int, Piece, FinishReason | None] | Exception | None](len(answers))
    pumps = [asyncio.ensure_future(_pump(i, answer, queue)) for i, answer in enumerate(answers)]
    try:
        num_open = len(answers)
        while num_open:
            entry = await queue.get()
            if entry is None:
                num_open -= 1
            elif isinstance(entry, Exception):
                raise entry
            else:
                yield entry
    finally:
        for pump in pumps:
            pump.cancel()


async def _pump(index: int, answer: AnswerStream, queue: asyncio.Queue[Any]) -> None:
    try:
        async for piece in answer:
            await queue.put((index, piece, answer.completion.finish_reason))
        await queue.put(None)
    except Exception as error:
        await queue.put(error)
