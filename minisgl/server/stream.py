"""An answer of the engine's process while it comes, for one task that reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from minisgl.core import TokenLogprobs
from minisgl.message.messages import Output
from minisgl.tokenizer.answer import Answer, Completion


class EngineDied(RuntimeError):
    """The engine process has ended, and with it every answer that was open; says how."""


class Piece(NamedTuple):
    """What an answer got since the piece before."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]


class AnswerStream:
    """An answer on its way: an async iterator of its pieces. For one reader.

    A piece holds all that came since the one before; the last one comes with the completion's finish_reason, and may
    have no text. A reader that gives up should abort the answer.

    Args:
        eager: wake the reader for each step, not only at the end.
        has_text: a piece without any says nothing, unless it is the last.
        on_stop: is called with the request's id when a stop string came.

    Attributes:
        completion: as far as it was read.
    """

    def __init__(self, answer: Answer, eager: bool, has_text: bool, on_stop: Callable[[int], object]) -> None:
        self.completion = answer.completion
        self._answer, self._on_stop = answer, on_stop
        self._eager, self._has_text = eager, has_text
        self._fresh, self._failure = False, ""  # something was received; nothing will be
        self._waiter: asyncio.Future[None] | None = None
        self._told = 0  # tokens given out

    def __aiter__(self) -> AnswerStream:
        return self

    async def __anext__(self) -> Piece:
        """The next piece.

        Raises:
            EngineDied: it will not come.
        """
        answer, completion = self._answer, self.completion
        while answer.is_open:
            if not (self._fresh or self._failure):
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            if self._failure:
                raise EngineDied(self._failure)
            self._fresh = False
            answer.read()
            if answer.stopped:
                self._on_stop(completion.request_id)
            told = self._told
            if answer.unread or not answer.is_open or (not self._has_text and len(completion.token_ids) > told):
                self._told = len(completion.token_ids)
                return Piece(answer.fetch(), completion.token_ids[told:], completion.logprobs[told:])
        raise StopAsyncIteration

    async def finished(self) -> Completion:
        """Read to the end.

        Raises:
            EngineDied: it will not come.
        """
        async for _ in self:
            pass
        return self.completion

    def receive(self, output: Output, now: float) -> None:
        """For the client: here is more."""
        self._answer.receive(output, now)
        if self._eager or output.finish_reason:
            self._fresh = True
            self._wake()

    def fail(self, reason: str) -> None:
        """For the client: there will be no more."""
        self._failure = reason
        self._wake()

    def _wake(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)
