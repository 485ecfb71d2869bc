"""The engine in a process of its own, as an asyncio program sees it."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
import traceback
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import minisgl_hub as hub
import zmq

from minisgl.config import EngineConfig
from minisgl.core import SamplingParams
from minisgl.distributed.ranks import RankDied, Ranks
from minisgl.message import messages as m
from minisgl.server.engine_process import address, run
from minisgl.server.stream import AnswerStream, EngineDied, Piece
from minisgl.tokenizer.answer import Answer, Completion
from minisgl.tokenizer.encode import Prompt, encode, is_ids, num_characters

__all__ = ["AnswerStream", "EngineClient", "EngineDied", "Piece"]

_SHORT = 4096  # characters, which are encoded in about a millisecond
_FEW = 1_000_000  # characters, which are encoded in a second or a few
_FAR_BEHIND = 1000  # trace events that a watcher has not taken
_END_S = 2.0  # for an engine to come out of its step


class EngineClient:
    """The engine in its own process, for one asyncio loop. Made by `start`.

    Attributes:
        config: as given.
        model_name: the model as the config names it.
        tokenizer: the model's Hugging Face tokenizer, for the loop's thread; None where random weights have none.
        device: where the model runs, as torch names it.
        max_len: tokens of the longest sequence, answer included.
        max_characters: a longer text certainly has more tokens than that, and encoding it would take long.
        vocab_size: token ids are below it.
        eos_token_ids: those that end an answer.
        gauges: the engine's state after its last step.
        dead: why the engine is gone; empty while it lives.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config, self.model_name = config, config.model
        self.tokenizer: Any = None
        self.device, self.max_len, self.max_characters, self.vocab_size = "", 0, 0, 0
        self.eos_token_ids: list[int] = []
        self.gauges, self.dead = m.Gauges(), ""
        self._loop, self._ids = asyncio.get_running_loop(), count()
        self._stage = ""
        self._on_stage: Callable[[str], object] = lambda _: None
        self._ready: asyncio.Future[m.Ready] = self._loop.create_future()
        self._open: dict[int, AnswerStream] = {}
        self._asked: dict[int, asyncio.Future[dict[str, float]]] = {}
        self._watchers: dict[int, asyncio.Queue[str | None]] = {}
        self._thread = ThreadPoolExecutor(1, "tokenizer")
        self._long_tokenizer: Any = None  # the thread's own: a tokenizer does not serve two at once
        self._folder = Path(tempfile.mkdtemp(prefix="minisgl-"))  # nobody else may enter it
        self._socket = zmq.Context().socket(zmq.PAIR)
        self._socket.linger = 0
        self._socket.set_hwm(0)  # nobody waits for the other side
        self._ranks: Ranks | None = None

    @classmethod
    async def start(
        cls, config: EngineConfig, on_stage: Callable[[str], object] | None = None, timeout_s: float = 600.0
    ) -> EngineClient:
        """Start the engine and wait until it takes requests. Cancelled, it leaves no process behind.

        Args:
            on_stage: is told what goes on ("loading the model").

        Raises:
            FetchError, ValueError: as LLM.
            EngineDied: it ended; with its traceback or signal.
            TimeoutError: it was not ready in time.
        """
        client = cls(config)
        client._on_stage = on_stage or client._on_stage
        try:
            await asyncio.wait_for(client._begin(), timeout_s)
        except BaseException as error:
            await client.close()
            if isinstance(error, asyncio.TimeoutError):
                raise TimeoutError(f"the engine was not ready within {timeout_s:g} s: it was {client._stage}") from None
            raise
        return client

    async def _begin(self) -> None:
        self._note_stage("looking for the model")
        config, in_thread = self.config, self._loop.run_in_executor
        path = await in_thread(self._thread, lambda: hub.resolve(config.model, config_only=config.random_weights))
        self._socket.bind(address(self._folder))
        self._loop.add_reader(self._socket.FD, self._read)
        self._note_stage("starting the engine's process")
        self._ranks = Ranks(2, run, (config, path, self._folder), names=("the engine",))
        me = weakref.ref(self)

        def died() -> None:
            if client := me():
                with suppress(RuntimeError):  # its loop is closed
                    client._loop.call_soon_threadsafe(client._die_of_rank)

        self._ranks.on_death(died)
        with suppress(hub.FetchError) if config.random_weights else nullcontext():
            self.tokenizer = await in_thread(self._thread, hub.load_tokenizer, path)
            self._long_tokenizer = await in_thread(self._thread, hub.load_tokenizer, path)
        ready = await self._ready
        self.device, self.max_len, self.vocab_size = ready.device, ready.max_len, ready.vocab_size
        self.eos_token_ids, self.gauges = ready.eos_token_ids, ready.gauges
        longest = max(map(len, self.tokenizer.get_vocab())) if self.tokenizer else 0
        self.max_characters = max(_FEW, 4 * longest * self.max_len)  # 4: some tokenizers join what looks alike

    @property
    def num_open(self) -> int:
        """Answers that have not ended."""
        return len(self._open)

    async def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: see minisgl.tokenizer.encode. A long one is encoded in a thread.

        Raises:
            ValueError: a chat for a model without a chat template, one that its template refuses, a text for a model
                without a tokenizer, or one that is far too long.
        """
        if is_ids(prompt):
            return list(prompt)
        if self.tokenizer is None:
            raise ValueError(f"{self.model_name} has no tokenizer here: give it token ids")
        if (characters := num_characters(prompt)) > self.max_characters:
            raise ValueError(
                f"the prompt has {characters:,} characters, a sequence at most {self.max_len:,} tokens: shorten it"
            )
        if characters <= _SHORT:
            return encode(self.tokenizer, prompt, self.model_name)
        work = partial(encode, self._long_tokenizer, prompt, self.model_name)
        return await self._loop.run_in_executor(self._thread, work)

    def submit(self, tokens: Sequence[int], params: SamplingParams, stream: bool = False) -> list[AnswerStream]:
        """Queue a prompt; returns its params.n answers at once. What is wrong with it becomes their completions' error.

        Args:
            stream: pieces are wanted as they come; else only the end is, by `finished`.

        Raises:
            EngineDied: there is no engine any more.
        """
        self._check()
        streams, tokenizer = [], self.tokenizer if params.detokenize else None
        for i, message in enumerate(m.submissions(self._ids, tokens, params, self.eos_token_ids)):
            answer = Answer(Completion(len(tokens), message.id, i), tokenizer, params.stop)
            streams.append(AnswerStream(answer, stream or bool(params.stop), tokenizer is not None, self._stop))
            try:
                data = m.encode(message)
            except (OverflowError, ValueError) as error:  # a number of more than 64 bits, half a character
                refusal = f"the request cannot be sent to the engine: {error}"
                streams[-1].receive(m.Output(message.id, [], "error", refusal), time.perf_counter())
                continue
            self._open[message.id] = streams[-1]
            self._send(data)
        return streams

    def abort(self, answer: AnswerStream) -> None:
        """End an answer at any moment: it finishes with "abort" in the next step. One that has ended is left alone."""
        if answer.completion.request_id in self._open:
            self._send(m.encode(m.Abort(answer.completion.request_id)))

    async def stats(self) -> dict[str, float]:
        """Work done so far, pages and bytes in use: see Engine.stats. Comes after the step that runs.

        Raises:
            EngineDied: there is no engine any more.
        """
        self._check()
        request_id, told = next(self._ids), self._loop.create_future()
        self._asked[request_id] = told
        self._send(m.encode(m.AskStats(request_id)))
        try:
            return await told
        finally:
            del self._asked[request_id]

    async def watch(self) -> AsyncIterator[str]:
        """Lines of JSON: the header and the events of a trace that begins now (see minisgl.engine.trace), at most some
        20 a second, until the iterator is closed (aclosing) or the engine is gone. Who falls far behind is left."""
        self._check()
        watcher, lines = next(self._ids), asyncio.Queue[str | None]()
        self._watchers[watcher] = lines
        self._send(m.encode(m.Watch(watcher, True)))
        try:
            while (line := await lines.get()) is not None:
                yield line
        finally:
            self._watchers.pop(watcher, None)
            self._send(m.encode(m.Watch(watcher, False)))

    async def close(self, grace_s: float = 0.0) -> None:
        """Let open answers end within the grace time, abort the rest, and end the process."""
        if self._socket.closed:
            return
        await self._all_ended(grace_s)
        for answer in list(self._open.values()):
            self.abort(answer)
        await self._all_ended(_END_S)
        self._send(m.encode(m.Stop()))
        self._ready.cancel()
        self._die("the engine was closed")
        if self._ranks:
            await asyncio.to_thread(self._ranks.close, _END_S if self.max_len else 0)  # while it loads it hears nothing
        self._loop.remove_reader(self._socket.FD)
        self._socket.close()
        self._socket.context.term()
        self._thread.shutdown(wait=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _all_ended(self, within_s: float) -> None:
        end = time.monotonic() + within_s
        while self._open and time.monotonic() < end:
            await asyncio.sleep(0.01)

    def _stop(self, request_id: int) -> None:
        """A stop string came: the engine need not go on, and what it has sent meanwhile is nobody's."""
        if self._open.pop(request_id, None):
            self._send(m.encode(m.Abort(request_id, "stop")))

    def _check(self) -> None:
        if self.dead:
            raise EngineDied(self.dead)

    def _send(self, data: bytes) -> None:
        if self.dead:
            return
        with suppress(zmq.Again):  # nobody is there any more, as we shall hear
            self._socket.send(data, zmq.NOBLOCK)
        self._loop.call_soon(self._read)  # a send may take the sign that there is something to read

    def _read(self) -> None:
        """Take all messages that are here."""
        try:
            while True:
                self._take(m.decode_from_engine(self._socket.recv(zmq.NOBLOCK)))
        except zmq.ZMQError:  # no more now, or closed
            return
        except Exception:  # a bug of ours, which must not leave anybody waiting
            self._die(traceback.format_exc())
            raise

    def _take(self, message: m.FromEngine) -> None:
        if isinstance(message, m.StepDone):
            now, self.gauges = time.perf_counter(), message.gauges
            for output in message.outputs:
                ended = output.finish_reason is not None
                answer = self._open.pop(output.id, None) if ended else self._open.get(output.id)
                if answer:
                    answer.receive(output, now)
        elif isinstance(message, m.Stats) and message.id in self._asked:
            _settle(self._asked[message.id], message.values)
        elif isinstance(message, m.Event) and message.id in self._watchers:
            lines = self._watchers[message.id]
            lines.put_nowait(message.line)
            if lines.qsize() > _FAR_BEHIND:
                self._watchers.pop(message.id).put_nowait(None)
        elif isinstance(message, m.Stage):
            shutil.rmtree(self._folder, ignore_errors=True)  # both are there: nothing stays behind, however they end
            self._note_stage(message.doing)
        elif isinstance(message, m.Refused):
            _settle(self._ready, ValueError(message.reason))
        elif isinstance(message, m.Ready):
            _settle(self._ready, message)

    def _note_stage(self, doing: str) -> None:
        self._stage = doing
        self._on_stage(doing)

    def _die_of_rank(self) -> None:
        try:
            assert self._ranks
            self._ranks.check()
        except RankDied as death:
            self._die(str(death))

    def _die(self, reason: str) -> None:
        if self.dead:
            return
        self.dead = reason
        _settle(self._ready, EngineDied(reason))
        for told in self._asked.values():
            _settle(told, EngineDied(reason))
        for answer in self._open.values():
            answer.fail(reason)
        for lines in self._watchers.values():
            lines.put_nowait(None)
        self._open.clear()


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    """Give a future its result or its error, unless nobody waits for it any more."""
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
