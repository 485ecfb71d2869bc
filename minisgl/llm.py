"""The engine with words: text or chats in, text out.

Ties together what knows nothing of each other: tokenizer, model and engine.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any

import minisgl_hub as hub
from tqdm import tqdm

from minisgl.config import EngineConfig
from minisgl.core import FinishReason, Request, SamplingParams, TokenLogprobs
from minisgl.distributed.ranks import RankDied
from minisgl.engine.build import build_engine, choose_device
from minisgl.engine.group import start
from minisgl.tokenizer.detokenizer import IncrementalDetokenizer
from minisgl.tokenizer.stop import StopStrings

Message = Mapping[str, str]  # {"role": "user", "content": "…"}
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass
class Completion:
    """What became of one prompt. Times are in seconds from its submission."""

    prompt_tokens: int
    request_id: int = 0  # for LLM.abort
    index: int = 0  # which of the n answers to its prompt
    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # an end-of-sequence token included
    finish_reason: FinishReason | None = None  # None while it is being written, or if it was cut off
    error: str = ""  # why, when finish_reason is "error"
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one a token, if asked for
    first_token_s: float = 0.0
    total_s: float = 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first, by the time they took; 0 for a single token."""
        rest = self.total_s - self.first_token_s
        return (len(self.token_ids) - 1) / rest if len(self.token_ids) > 1 else 0.0


class _Answer:
    """A request on its way, and its completion as it stands."""

    def __init__(self, request: Request, index: int, detokenizer: IncrementalDetokenizer | None) -> None:
        self.request = request
        self.completion = Completion(request.prompt_len, request.id, index)
        self.unread = ""  # text that nobody has fetched
        self.stopped = False  # a stop string came
        self._detokenizer, self._stops = detokenizer, StopStrings(request.params.stop)
        self._submitted = time.perf_counter()

    @property
    def is_open(self) -> bool:
        return self.completion.finish_reason is None

    def update(self, now: float) -> int:
        """Take in what the request got since the last call, as of now; returns the number of tokens."""
        request, completion = self.request, self.completion
        new_tokens = request.tokens[request.prompt_len + len(completion.token_ids) :]
        completion.token_ids += new_tokens
        if self._detokenizer:
            for token in new_tokens:
                if not self.stopped:
                    self._say(self._detokenizer.push(token))
            if request.finish_reason and not self.stopped:
                self._say(self._detokenizer.flush(), last=True)
        completion.total_s = now - self._submitted
        if completion.token_ids and not completion.first_token_s:
            completion.first_token_s = completion.total_s
        completion.cached_tokens, completion.logprobs = request.num_cached, request.logprobs
        completion.error = request.error
        completion.finish_reason = "stop" if self.stopped else request.finish_reason
        return len(new_tokens)

    def _say(self, piece: str, last: bool = False) -> None:
        text, self.stopped = self._stops.push(piece)
        if last and not self.stopped:
            text += self._stops.flush()
        self.completion.text += text
        self.unread += text


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
        self.device = choose_device(self.config.device)
        make = build_engine if self.config.tp == 1 else start
        self.engine = make(self.config, self.path, self.device)
        self.model = self.engine.model
        self.work = self.engine.work
        self._open: dict[int, _Answer] = {}
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
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        if not prompt or isinstance(prompt[0], int):
            return list(prompt)  # type: ignore[arg-type]
        if self.tokenizer.chat_template is None:
            raise ValueError(f"{self.config.model} has no chat template: give it plain text to continue")
        try:
            text = self.tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template raises what it likes: over a role that it does not know, say
            raise ValueError(f"the model's chat template refuses this chat: {error}") from error
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])  # the template wrote them already

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
        answers: list[_Answer] = []
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
                piece, answer.unread = answer.unread, ""
                last = not answer.is_open
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

    async def _next_piece(self, answer: _Answer, lock: asyncio.Lock) -> tuple[str, bool]:
        """New text, and whether it is the last. A task of its own: a step runs to its end under the lock, however often
        its stream is cancelled."""
        async with lock:
            if answer.is_open and not answer.unread:
                await asyncio.to_thread(self.step)
            piece, answer.unread = answer.unread, ""
            return piece, not answer.is_open

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
            self._output_tokens += answer.update(now)
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

    def _submit(self, prompt: Prompt, params: SamplingParams) -> list[_Answer]:
        """Queue the n requests of a prompt; what is wrong with a prompt becomes its completion's error."""
        ids, refusal = list[int](), self._refusal
        try:
            ids = self.encode(prompt)
        except ValueError as problem:
            refusal = refusal or str(problem)
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= set(self.model.config.eos_token_ids)
        first_seed = random.getrandbits(62) if params.seed is None else params.seed
        answers = []
        for i in range(params.n):
            request = Request(next(self._ids), list(ids), params, stop_ids, seed=(first_seed + i) % 2**63)
            answer = _Answer(request, i, IncrementalDetokenizer(self.tokenizer) if params.detokenize else None)
            answers.append(answer)
            self._open[request.id] = answer
            self.engine.add(request, refusal)
        return answers

    def _submit_one(self, prompt: Prompt, params: SamplingParams | None) -> _Answer:
        params = params or SamplingParams()
        if params.n != 1:
            raise ValueError(f"n is {params.n}, but a stream carries one answer: start n streams, or use generate")
        return self._submit(prompt, params)[0]

    def _abandon(self, answers: list[_Answer]) -> None:
        """Abort what is still open: nobody waits for it any more."""
        for answer in answers:
            if answer.is_open:
                self._open.pop(answer.request.id, None)
                self.abort(answer.request.id)
