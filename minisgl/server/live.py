"""A response that is written while its client listens, and given up when it has gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl.server.client import EngineDied
from minisgl.server.errors import ApiError
from minisgl.server.replies import encode, frame

log = logging.getLogger(__name__)
_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_EVENTS += [(b"x-accel-buffering", b"no")]  # says to nginx: pass on what comes


class Live(Response):
    """Runs `work(self)`, which writes with `json` once or with `events`, beside a watch on the connection.

    When the client hangs up or the time is over, the work is cancelled. An error before the first byte becomes the
    response, and a later one the last event of the stream.

    Args:
        timeout_s: for all of it; 0 sets no limit.
        cut_off: is told why when the work was cancelled.
    """

    def __init__(
        self, work: Callable[[Live], Awaitable[None]], timeout_s: float = 0.0, cut_off: Callable[[str], object] = str
    ) -> None:
        super().__init__()
        self._work, self._timeout_s, self._cut_off = work, timeout_s, cut_off
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the response."""
        self._send = send
        work = asyncio.ensure_future(self._work(self))
        gone = asyncio.ensure_future(_hung_up(receive))
        try:
            await asyncio.wait((work, gone), timeout=self._timeout_s or None, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return await self._end(work.exception())
            self._cut_off("client_gone" if gone.done() else "timeout")
            work.cancel()
            await asyncio.wait((work,))
            if not gone.done():
                late = f"the answer was not complete after {self._timeout_s:g} s: see --request-timeout-s"
                await self._end(ApiError(408, late, code="timeout", headers={"x-should-retry": "false"}))
        finally:
            work.cancel()
            gone.cancel()

    async def _end(self, error: BaseException | None) -> None:
        if error is None:
            return
        if not self._started:
            raise error
        if not isinstance(error, ApiError):
            if not isinstance(error, EngineDied):
                log.error("an answer broke off", exc_info=error)
            error = as_api_error(error)
        await self.events(frame(error.body), last=True)

    async def json(self, data: object) -> None:
        """All of it, as one JSON body."""
        body = encode(data)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await self._start(headers)
        await self._send({"type": "http.response.body", "body": body})

    async def events(self, data: bytes, last: bool = False) -> None:
        """The next server-sent events."""
        if not self._started:
            await self._start(_EVENTS)
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def _start(self, headers: list[tuple[bytes, bytes]]) -> None:
        self._started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": [*headers]})


async def _hung_up(receive: Receive) -> None:
    """Until the client has gone. The empty body of a GET may come before, which nobody has read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of an error that is not its own."""
    if isinstance(error, EngineDied):
        return ApiError(503, f"the engine is gone: {str(error).strip().splitlines()[0]}", code="engine_died")
    return ApiError(500, "something went wrong in the server, which has its details in the log", code="internal_error")
