"""A model behind any OpenAI server, in the form in which the terminal's chat uses an LLM. Imports no torch."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import fields
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from minisgl.core import SamplingParams
from minisgl.tokenizer.answer import Completion
from minisgl.tokenizer.encode import Message

_CONNECT_S = 10.0  # to be let in; an answer may take as long as it takes
_ALWAYS = ("max_tokens", "temperature")  # whose defaults are not the server's
_HERE = ("n", "logprobs", "detokenize")  # not for the server: a terminal shows one answer, in words


class Remote:
    """A model on a server.

    Args:
        url: with or without /v1.
        key: the server's API key, if it wants one.
        model: by the server's name; "" is the first that it lists.

    Raises:
        ValueError: the url is none, or the server lists no model.
        ConnectionError: no server answers.
    """

    def __init__(self, url: str, key: str = "", model: str = "") -> None:
        self.url, self._key = server_url(url), key
        self.model = model or self._first_model()
        self._usage: dict[str, float] = {}

    def stream(self, messages: Sequence[Message], params: SamplingParams) -> Iterator[tuple[str, Completion]]:
        """Yield each new piece of text with the completion as it stands, as `LLM.stream` does, but without token ids.
        Closing it hangs up, and the server ends the answer.

        Raises:
            ValueError: the server refuses, or breaks off, with its reason.
            ConnectionError: it does not answer any more.
        """
        asked = {
            "model": self.model,
            "messages": [*messages],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if params.n != 1:
            raise ValueError(f"n is {params.n}, but a stream carries one answer")
        defaults, self._usage = SamplingParams(), {}
        for name in (f.name for f in fields(params) if f.name not in _HERE):
            if name in _ALWAYS or getattr(params, name) != getattr(defaults, name):
                asked[name] = getattr(params, name)
        start, completion = time.perf_counter(), Completion(prompt_tokens=0)
        with closing(self._request("/v1/chat/completions", asked)) as events:
            for event in events:
                if event.get("error"):
                    raise ValueError(error_message(json.dumps(event).encode()))
                completion.total_s = time.perf_counter() - start
                if usage := event.get("usage"):
                    self._count(usage, completion)
                for choice in event.get("choices", ()):
                    completion.finish_reason = choice.get("finish_reason") or completion.finish_reason
                    if piece := choice["delta"].get("content"):
                        completion.first_token_s = completion.first_token_s or completion.total_s
                        completion.text += piece
                        yield piece, completion
        if completion.finish_reason is None:
            raise ConnectionError(f"{self.url} broke off in the middle of the answer")
        yield "", completion

    def stats(self) -> dict[str, float]:
        """The server's count of the last answer's tokens; empty if it was stopped."""
        return self._usage

    def _count(self, usage: dict[str, Any], completion: Completion) -> None:
        completion.prompt_tokens = usage["prompt_tokens"]
        completion.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        self._usage = {
            "prompt_tokens": completion.prompt_tokens,
            "cached_tokens": completion.cached_tokens,
            "output_tokens": usage["completion_tokens"],
            "ms_to_the_first_token": 1000 * completion.first_token_s,
            "ms_in_all": 1000 * completion.total_s,
        }

    def _first_model(self) -> str:
        [listed] = self._request("/v1/models")
        try:
            return str(listed["data"][0]["id"])
        except (LookupError, TypeError):
            raise ValueError(f"{self.url}/v1/models lists no model: is this an OpenAI server?") from None

    def _request(self, path: str, body: dict[str, Any] | None = None) -> Generator[dict[str, Any], None, None]:
        """The events of the reply as they come, or its body as the only one."""
        place = urlsplit(self.url + path)
        kind = HTTPSConnection if place.scheme == "https" else HTTPConnection
        connection = kind(place.netloc, timeout=_CONNECT_S)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        try:
            connection.connect()
            connection.sock.settimeout(None)
            data = None if body is None else json.dumps(body)
            connection.request("GET" if data is None else "POST", place.path, data, headers)
            reply = connection.getresponse()
            if reply.status != 200:
                raise ValueError(f"{error_message(reply.read()) or reply.reason} ({reply.status})")
            yield from _events(reply) if body else [json.load(reply)]
        except (OSError, HTTPException) as error:
            raise ConnectionError(f"no answer from {self.url}: {getattr(error, 'strerror', '') or error}") from None
        except json.JSONDecodeError:
            raise ValueError(f"{self.url}{path} answers, but not in JSON: is this an OpenAI server?") from None
        finally:
            connection.close()


def server_url(url: str) -> str:
    """http://host:port of what people paste: with a slash at the end, or with /v1.

    Raises:
        ValueError: it does not begin with http:// or https://.
    """
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise ValueError(f"{url} is no address of a server: write it as http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _events(reply: HTTPResponse) -> Iterator[dict[str, Any]]:
    """The server-sent events of a reply, up to [DONE]. Those of OpenAI's API have one line of data each."""
    for line in reply:
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        if line.startswith(b"data:"):
            yield json.loads(data)


def error_message(body: bytes) -> str:
    """What an error's body says, in OpenAI's shape or another; at most some lines of it."""
    try:
        found = json.loads(body)
    except ValueError:
        return body.decode(errors="replace").strip()[:300]
    error = found.get("error", found) if isinstance(found, dict) else found
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return (error if isinstance(error, str) else json.dumps(error))[:1000]
