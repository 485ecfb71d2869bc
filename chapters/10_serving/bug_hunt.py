"""The desk between connections and the engine. Long prompts are tokenized in a thread. It has one bug: find it.

Everybody is answered, and the pages of whoever hangs up come back. Yet at night, with nobody connected, some requests
run. Run `pytest tests/ch10_serving/test_bug_hunt.py --runxfail` to see the symptom, and again to see it gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count

from minisgl.core import SamplingParams
from minisgl.message.messages import Abort, Output, Submit


class Desk:
    """Takes texts in and gives answers' token ids out.

    Args:
        tokenize: a text's ids; a long text takes its time, and nobody waits for it on the loop.
        send: puts a message on its way to the engine, in order and at once.
    """

    def __init__(self, tokenize: Callable[[str], Awaitable[list[int]]], send: Callable[[Submit | Abort], None]) -> None:
        self.tokenize, self.send = tokenize, send
        self.open: dict[int, asyncio.Future[list[int]]] = {}
        self.received: dict[int, list[int]] = {}
        self._ids = count()
        self._tasks = set[asyncio.Task[None]]()

    async def ask(self, text: str, params: SamplingParams) -> list[int]:
        """The answer. Cancelled when its client hangs up."""
        request_id, answer = next(self._ids), asyncio.get_running_loop().create_future()
        self.open[request_id], self.received[request_id] = answer, []
        task = asyncio.ensure_future(self._submit(request_id, text, params))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await answer
        except asyncio.CancelledError:
            self.send(Abort(request_id))  # nobody waits for it any more
            raise
        finally:
            del self.open[request_id], self.received[request_id]

    def receive(self, output: Output) -> None:
        """What a step brought to one request."""
        if output.id not in self.open:  # aborted, and this was under way
            return
        self.received[output.id] += output.tokens
        if output.finish_reason:
            self.open[output.id].set_result(self.received[output.id])

    async def _submit(self, request_id: int, text: str, params: SamplingParams) -> None:
        tokens = await self.tokenize(text)
        self.send(Submit(request_id, tokens, params, 0, []))
