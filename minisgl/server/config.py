"""How the server listens, what it lets in, and how it ends. Imports no web framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minisgl.core import require


@dataclass(frozen=True)
class ServerConfig:
    """The server around the engine.

    Args:
        host: the address to listen at; 0.0.0.0 is all networks of this machine, which is wise only with an API key.
        port: the port to listen at; 0 takes a free one.
        api_key: what clients must send as their bearer token, except for the page, /health and /metrics.
        served_model_name: the name that clients give; without one, what --model says.
        max_queue: answers that may wait besides those that run; more are refused with 429.
        max_request_bytes: a longer request body is refused with 413.
        request_timeout_s: an answer that is not complete after this time, waiting included, ends with 408; 0 never.
        grace_s: at the end, open answers may go on for this time before they are aborted.
        cors_origins: web pages of this origin may call the server, as in https://example.com; * lets all.
        preload: a file of prompts to compute at the start, so that others that begin like them need not.
            A line is a text, or a JSON object with "prompt" or "messages".
        memory_alarm: warn when more than this share of the pages is held by running requests.

    Raises:
        ValueError: a value out of range, naming the field.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    served_model_name: str | None = None
    max_queue: int = 1024
    max_request_bytes: int = 8_000_000
    request_timeout_s: float = 3600.0
    grace_s: float = 10.0
    cors_origins: Sequence[str] = ()
    preload: str | None = None
    memory_alarm: float = 0.95

    def __post_init__(self) -> None:
        require(self, 0 <= self.port <= 65535, "port", "between 0 (any) and 65535")
        require(self, self.api_key != "", "api_key", "at least one character")
        for name in ("max_queue", "max_request_bytes", "request_timeout_s", "grace_s"):
            require(self, 0 <= getattr(self, name) < float("inf"), name, "0 or more, and finite")
        require(self, 0 < self.memory_alarm <= 1, "memory_alarm", "above 0 and at most 1")
