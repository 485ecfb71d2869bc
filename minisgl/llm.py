"""The engine with words: text or chats in, text out.

Ties together what knows nothing of each other: tokenizer, model and engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import count
from typing import Any

import minisgl_hub as hub
from tqdm import tqdm

from minisgl.config import EngineConfig
from minisgl.core import SamplingParams
from minisgl.distributed.ranks import RankDied
from minisgl.engine.group import open_engine
from minisgl.message.messages import news, submissions
from minisgl.tokenizer.answer import Answer, Completion
from minisgl.tokenizer.encode import Message, Prompt, encode, is_ids

__all__ = ["LLM", "Completion", "Message", "Prompt"]


class LLM:
    """A model ready to answer many prompts at once. Usable as a context manager.

    Not for several threads: interleave streams in one thread, or use `astream`.

    Raises:
        FetchError: there is no such model, or it cannot be fetched.
        ValueError: the model is unsupported or damaged, or the config does not fit it.
        RankDied: with tp, another process failed, now or in a later call; with its traceback or signal.
    """

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        self.path = hub.resolve(self.config.model, config_only=self.config.random_weights)
        self.engine = open_engine(self.config, self.path)
        self.model, self.device = self.engine.model, self.engine.model.device
        self.work = self.engine.work
        self._open: dict[int, Answer] = {}
        self._to_abort: list[int] = []
        self._ids, self._refusal = count(), ""
        self._output_tokens, self._busy_s = 0, 0.0
        self._loop: tuple[asyncio.AbstractEventLoop | None, asyncio.Lock] = (None, asyncio.Lock())

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer, loaded when text is first met."""
        return hub.load_tokenizer(self.path)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, of a chat (through the model's chat template, open for the answer), or ids as they are.

        Raises:
            ValueError: a chat for a model without a chat template, or one that its template refuses.
        """
        return list(prompt) if is_ids(prompt) else encode(self.tokenizer, prompt, self.config.model)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Complete all prompts side by side.

        Args:
            prompts: texts, lists of token ids or chats; a single one is taken as a list of one.
            params: for all, or one for each prompt.
            progress: show a bar; None shows it on a terminal when there is more than one answer.

        Returns:
            The completions in the order of the prompts, those of one prompt (params.n) beside each other. A prompt that
            cannot be served has finish_reason "error" and says why.

        Raises:
            ValueError: the numbers of prompts and params differ.
        """
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int | Mapping)):
            prompts = [prompts]  # type: ignore[assignment]
        each = params if isinstance(params, Sequence) else [params or SamplingParams()] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(each)} params: give one for all, or one for each")
        answers: list[Answer] = []
        try:
            for prompt, own in zip(prompts, each, strict=True):
                answers += self._submit(prompt, own)  # type: ignore[arg-type]
            hidden = len(answers) == 1 or None if progress is None else not progress  # None: on a terminal only
            with tqdm(total=len(answers), unit="answer", disable=hidden) as bar:
                while missing := sum(answer.is_open for answer in answers):
                    self.step()
                    bar.update(missing - sum(answer.is_open for answer in answers))
        finally:
            self._abandon(answers)
        return [answer.completion for answer in answers]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[tuple[str, Completion]]:
        """Yield each new piece of text with the completion as it stands; the last piece comes with its finish_reason.

        Streams may be interleaved: each step serves all of them. Closing one aborts its request.

        Raises:
            ValueError: params.n is not 1.
        """
        answer = self._submit_one(prompt, params)
        try:
            while True:
                while answer.is_open and not answer.unread:
                    self.step()
                piece, last = answer.fetch(), not answer.is_open
                yield piece, answer.completion
                if last:
                    return
        finally:
            self._abandon([answer])

    async def astream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncIterator[tuple[str, Completion]]:
        """Like `stream`, for asyncio: steps run in a thread, started by whichever stream has nothing to give out."""
        if self._loop[0] is not asyncio.get_running_loop():  # a lock serves one loop
            self._loop = asyncio.get_running_loop(), asyncio.Lock()
        lock = self._loop[1]  # no two steps at once, and nobody comes during one
        async with lock:
            answer = self._submit_one(prompt, params)
        try:
            while True:
                piece, last = await asyncio.shield(self._next_piece(answer, lock))
                if piece or last:
                    yield piece, answer.completion
                if last:
                    return
        finally:
            self._abandon([answer])

    async def _next_piece(self, answer: Answer, lock: asyncio.Lock) -> tuple[str, bool]:
        """New text, and whether it is the last. A task of its own: a step runs to its end under the lock, however often
        its stream is cancelled."""
        async with lock:
            if answer.is_open and not answer.unread:
                await asyncio.to_thread(self.step)
            return answer.fetch(), not answer.is_open

    def abort(self, request_id: int) -> None:
        """End a request at any moment: its completion finishes with "abort" in the next step."""
        self._to_abort.append(request_id)  # a step of `astream` may be running in its thread

    def step(self) -> None:
        """Run one step of the engine and bring all open completions up to date."""
        start = time.perf_counter()
        while self._to_abort:
            self.engine.abort(self._to_abort.pop())
        with self.engine.guard():
            grown, now = self.engine.step(), time.perf_counter()
        for request in grown:
            answer = self._open.get(request.id)
            if answer is None:  # ended by a stop string or abandoned
                continue
            output = news(request, len(answer.completion.token_ids))
            self._output_tokens += len(output.tokens)
            answer.receive(output, now)
            answer.read()
            if answer.stopped and request.finish_reason is None:
                self.engine.abort(request.id, "stop")
            if not answer.is_open:
                self._open.pop(request.id, None)
        self._busy_s += time.perf_counter() - start

    def stats(self) -> dict[str, float]:
        """Work done so far, output tokens per second of stepping, pages and bytes in use."""
        return self.engine.stats() | {
            "output_tokens": self._output_tokens,
            "output_tokens_per_s": self._output_tokens / self._busy_s if self._busy_s else 0.0,
            "weight_bytes": sum(p.nbytes for p in self.model.parameters()),
        }

    def close(self) -> None:
        """End all requests, complete the trace and give the pool's memory back. Later prompts are refused."""
        for request_id in list(self._open):
            self.engine.abort(request_id)
        with suppress(RankDied):  # then nobody waits for anything
            self.step()
        self.engine.close()
        self._refusal = "this LLM is closed: make a new one"

    def _submit(self, prompt: Prompt, params: SamplingParams) -> list[Answer]:
        """Queue the n requests of a prompt; what is wrong with a prompt becomes its completion's error."""
        ids, refusal = list[int](), self._refusal
        try:
            ids = self.encode(prompt)
        except ValueError as problem:
            refusal = refusal or str(problem)
        answers = []
        for i, submit in enumerate(submissions(self._ids, ids, params, self.model.config.eos_token_ids)):
            completion = Completion(len(ids), submit.id, i)
            answers.append(Answer(completion, self.tokenizer if params.detokenize else None, params.stop))
            self._open[submit.id] = answers[-1]
            self.engine.add(submit.request(), refusal)
        return answers

    def _submit_one(self, prompt: Prompt, params: SamplingParams | None) -> Answer:
        params = params or SamplingParams()
        if params.n != 1:
            raise ValueError(f"n is {params.n}, but a stream carries one answer: start n streams, or use generate")
        return self._submit(prompt, params)[0]

    def _abandon(self, answers: list[Answer]) -> None:
        """Abort what is still open: nobody waits for it any more."""
        for answer in answers:
            if answer.is_open:
                self._open.pop(answer.completion.request_id, None)
                self.abort(answer.completion.request_id)
