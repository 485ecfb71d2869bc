"""A connection, with what uvicorn does not limit: the size of a request's head, and the time until it is there."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 65_536  # of request line and headers; a head that comes in one piece may be longer
HEAD_TIMEOUT_S = 30.0  # from the connection, or from the first byte of a later request


class HttpProtocol(HttpToolsProtocol):
    """Refuses heads that are too long, and closes connections that never send theirs."""

    _head_bytes: int | None = None  # of a head that is not complete
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes is not None and self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of the request is too long.")

    def on_message_begin(self) -> None:
        if self._head_bytes is None:
            self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_came()
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _head_came(self) -> None:
        self._head_bytes = None
        if self._timer:
            self._timer.cancel()
