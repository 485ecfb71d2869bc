"""What stands between HTTP and the routes: the API key, limits on what a client may send, ids and counts."""

from __future__ import annotations

import asyncio
import hmac
import uuid
from collections import Counter

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.server.config import ServerConfig
from minisgl.server.errors import ApiError

BODY_TIMEOUT_S = 60.0  # between two parts of a request's body
_OPEN = ("/", "/health", "/metrics")  # without a key, as is the page


class Gate:
    """An ASGI app around another. Bodies are judged when a route reads them, so that a wrong path is still a 404.

    Args:
        errors: counts responses with an error, by status.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, errors: Counter[str]) -> None:
        self.app, self.config, self.errors = app, config, errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = f"req_{uuid.uuid4().hex}"
                if message["status"] >= 400:
                    self.errors[str(message["status"])] += 1
            await send(message)

        headers = Headers(scope=scope)
        if not self._may_enter(scope["path"], headers):
            error = ApiError(401, "this server wants its API key: Authorization: Bearer KEY", code="invalid_api_key")
            refuse = JSONResponse(error.body, 401, {"www-authenticate": "Bearer"})
            return await refuse(scope, receive, told)
        body = receive if scope["method"] in ("GET", "HEAD") else self._limited(receive, headers)
        await self.app(scope, body, told)

    def _may_enter(self, path: str, headers: Headers) -> bool:
        if self.config.api_key is None or path in _OPEN or path.startswith("/page/"):
            return True
        kind, _, key = headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and hmac.compare_digest(key.strip().encode(), self.config.api_key.encode())

    def _limited(self, receive: Receive, headers: Headers) -> Receive:
        """Receive, with limits until the body is complete."""
        most, num_bytes, complete = self.config.max_request_bytes, 0, False
        length = headers.get("content-length", "")
        asks_first = "expect" in headers and length.isdigit() and int(length) > most
        text = f"the request's body is longer than {most:,} bytes: see --max-request-bytes"
        too_long = ApiError(413, text, headers={"connection": "close"})

        async def limited() -> Message:
            nonlocal num_bytes, complete
            if complete:
                return await receive()
            if num_bytes == 0:
                _require_json(headers.get("content-type", ""))
            while not asks_first:
                try:
                    message = await asyncio.wait_for(receive(), BODY_TIMEOUT_S)
                except asyncio.TimeoutError:
                    raise ApiError(408, f"the rest of the body did not come within {BODY_TIMEOUT_S:g} s") from None
                num_bytes += len(message.get("body", b""))
                complete = not message.get("more_body", False)
                if num_bytes <= most:
                    return message
                if complete or num_bytes > 8 * most:  # a client listens only when it has said everything
                    break
            raise too_long

        return limited


def _require_json(content_type: str) -> None:
    """Whatever a browser sends to strangers without asking them first is refused with this."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        given = f"it is {kind!r}" if kind else "there is none"
        raise ApiError(415, f"the content type must be application/json, but {given}: curl wants -H for it, or --json")
