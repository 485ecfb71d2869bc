"""What must not be answered, and how it is refused: no request hangs, breaks or slows down the server.

After each of them the server answers a good request as it did at the start.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from uvicorn.server import ServerState

from minisgl.server import gate, http
from minisgl.server.config import ServerConfig
from minisgl.server.errors import ApiError
from tests.server.conftest import PATIENCE_S, wait_until

pytestmark = pytest.mark.xdist_group("server")

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ABSENT = object()  # takes a field out of the good request


@dataclass(frozen=True)
class Bad:
    """A request and its refusal.

    Attributes:
        body: fields that replace those of a good request to the path; or all of the body.
        param: what the error's param must be.
        says: a word of its message.
    """

    body: Any
    param: str | None = None
    says: str = ""
    status: int = 400
    path: str = COMPLETIONS
    method: str = "POST"
    content_type: str | None = "application/json"


def fields(path: str, **cases: tuple[str, Any] | tuple[str, Any, str]) -> dict[str, Bad]:
    """Requests with one wrong field each, whose param is the field."""
    return {
        f"{path} {case}".replace("_", " "): Bad({name: value}, name, *rest, path=path)
        for case, (name, value, *rest) in cases.items()
    }


MESSAGE = {"role": "user", "content": "hi"}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
HUGE = 10**400


def deep(levels: int, kind: str = "[]") -> bytes:
    """JSON of so many levels."""
    open_, close = ('{"a":', "}") if kind == "{}" else ("[", "]")
    return (open_ * levels + "1" + close * levels).encode()


def raw(text: str | bytes) -> bytes:
    """A body in place of the good one."""
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")


CASES: dict[str, Bad] = {
    # numbers
    **fields(
        COMPLETIONS,
        max_tokens_0=("max_tokens", 0),
        max_tokens_negative=("max_tokens", -1),
        max_tokens_in_quotes=("max_tokens", "5"),
        max_tokens_a_fraction=("max_tokens", 1.5),
        max_tokens_true=("max_tokens", True),
        max_tokens_of_70_bits=("max_tokens", 2**70),
        max_tokens_of_400_digits=("max_tokens", HUGE),
        max_tokens_a_list=("max_tokens", [5]),
        min_tokens_above_max_tokens=("min_tokens", 17, "max_tokens"),
        min_tokens_negative=("min_tokens", -1),
        temperature_negative=("temperature", -0.1),
        temperature_above_2=("temperature", 2.1),
        temperature_in_quotes=("temperature", "1"),
        temperature_of_400_digits=("temperature", HUGE),
        temperature_an_object=("temperature", {}),
        top_p_negative=("top_p", -0.5),
        top_p_above_1=("top_p", 1.01),
        top_p_false=("top_p", False),
        top_k_below_minus_1=("top_k", -2),
        top_k_a_fraction=("top_k", 0.5),
        top_k_of_70_bits=("top_k", 2**70),
        min_p_above_1=("min_p", 2),
        presence_penalty_above_2=("presence_penalty", 2.5),
        frequency_penalty_below_minus_2=("frequency_penalty", -2.5),
        repetition_penalty_of_next_to_nothing=("repetition_penalty", 5e-324),
        repetition_penalty_0=("repetition_penalty", 0),
        repetition_penalty_negative=("repetition_penalty", -1),
        n_0=("n", 0),
        n_negative=("n", -3),
        n_a_billion=("n", 10**9),
        n_in_quotes=("n", "1"),
        seed_in_quotes=("seed", "1"),
        seed_a_fraction=("seed", 0.5),
        seed_of_70_bits=("seed", 2**70),
        priority_of_70_bits=("priority", 2**70),
        priority_a_word=("priority", "high"),
        logprobs_negative=("logprobs", -1),
        logprobs_21=("logprobs", 21),
        logprobs_true=("logprobs", True),
        stream_a_word=("stream", "yes"),
        stream_1=("stream", 1),
        ignore_eos_1=("ignore_eos", 1),
        cache_salt_a_number=("cache_salt", 3),
        cache_salt_of_100_000_letters=("cache_salt", "x" * 100_000),
        user_a_number=("user", 7),
    ),
    # stop strings, stop tokens, logit bias
    **fields(
        COMPLETIONS,
        stop_a_number=("stop", 3),
        stop_empty=("stop", ""),
        stop_of_1000_strings=("stop", ["x"] * 1000),
        stop_of_100_000_letters=("stop", "x" * 100_000),
        stop_an_object=("stop", {"a": "b"}),
        logit_bias_a_list=("logit_bias", [1, 2]),
        logit_bias_of_a_token_beyond_the_vocabulary=("logit_bias", {"99999999": 1}, "99999999"),
        stop_token_ids_beyond_the_vocabulary=("stop_token_ids", [10**6], "1000000"),
        stop_token_ids_too_many=("stop_token_ids", [5] * 5000),
    ),
    "a stop string among others is a number": Bad({"stop": ["a", 3]}, "stop.1"),
    "a stop string among others is empty": Bad({"stop": ["a", ""]}, "stop.1"),
    "a stop token is a word": Bad({"stop_token_ids": ["a"]}, "stop_token_ids.0"),
    "a stop token is negative": Bad({"stop_token_ids": [-1]}, "stop_token_ids.0"),
    "logit_bias of a word": Bad({"logit_bias": {"hello": 1}}, says="logit_bias"),
    "logit_bias of a negative token": Bad({"logit_bias": {"-1": 1}}, says="logit_bias"),
    "logit_bias of nothing": Bad({"logit_bias": {"": 1}}, says="logit_bias"),
    "logit_bias of a fraction": Bad({"logit_bias": {"1.5": 1}}, says="logit_bias"),
    "logit_bias of a token of 40 digits": Bad({"logit_bias": {"1" * 40: 1}}, says="logit_bias"),
    "logit_bias of foreign digits": Bad({"logit_bias": {"٣": 1}}, says="logit_bias"),
    "logit_bias above 100": Bad({"logit_bias": {"5": 101}}, "logit_bias.5"),
    "logit_bias a word": Bad({"logit_bias": {"5": "much"}}, "logit_bias.5"),
    # prompts
    **fields(
        COMPLETIONS,
        no_prompt=("prompt", ABSENT, "missing"),
        prompt_null=("prompt", None),
        prompt_empty=("prompt", "", "empty"),
        prompt_an_empty_list=("prompt", []),
        prompt_a_number=("prompt", 3),
        prompt_an_object=("prompt", {"text": "hi"}),
        prompt_true=("prompt", True),
        prompt_longer_than_the_context=("prompt", "x" * 5000, "5,000"),
        prompt_of_too_many_ids=("prompt", [5] * 5000, "5,000"),
        prompt_of_150_000_characters=("prompt", "hello world " * 12_500, "150,000"),
        prompt_id_beyond_the_vocabulary=("prompt", [5, 300], "300"),
    ),
    "a prompt's id is negative": Bad({"prompt": [5, -1]}, "prompt.1"),
    "a prompt's id has 70 bits": Bad({"prompt": [5, 2**70]}, "prompt.1"),
    "a prompt's id is a fraction": Bad({"prompt": [5, 5.5]}, "prompt.1"),
    "a prompt's id is null": Bad({"prompt": [5, None]}, "prompt.1"),
    "a prompt of texts and ids": Bad({"prompt": ["a", 5]}, "prompt.1"),
    "one prompt of several is empty": Bad({"prompt": ["a", ""]}, "prompt", "empty"),
    "one prompt of several has no ids": Bad({"prompt": [[5], []]}, "prompt.1"),
    "one prompt of several has an id beyond the vocabulary": Bad({"prompt": [[5], [5, 10**6]]}, "prompt", "1000000"),
    "one prompt of several is longer than the context": Bad({"prompt": ["a", "x" * 5000]}, "prompt", "5,000"),
    "a prompt of lists of lists": Bad({"prompt": [[[5]]]}, says="prompt.0"),
    "more prompts than the server has room for": Bad({"prompt": ["x"] * 5000}, says="5,000"),
    "more answers than the server has room for": Bad({"prompt": ["x"] * 5, "n": 10}, "n", "50"),
    "n more than the server has room for": Bad({"n": 100}, "n", "100"),
    "n more than the server has room for, in a chat": Bad({"n": 100}, "n", "100", path=CHAT),
    # fields that are not served, by name
    **fields(
        COMPLETIONS,
        guided_json=("guided_json", {}, "not supported"),
        beam_search=("use_beam_search", True, "not supported"),
        messages=("messages", [MESSAGE], "not supported"),
    ),
    **fields(
        CHAT,
        thinking=("thinking", True, "not supported"),
        extra_body=("extra_body", {}, "not supported"),
        capital_letters=("MAX_TOKENS", 5, "not supported"),
    ),
    **fields(
        COMPLETIONS,
        best_of_2=("best_of", 2),
        echo=("echo", True),
        suffix=("suffix", "the end"),
        stream_options_without_stream=("stream_options", {"include_usage": True}, "stream"),
    ),
    **fields(
        CHAT,
        tools=("tools", [TOOL]),
        functions=("functions", [TOOL["function"]]),
        store=("store", True),
        service_tier=("service_tier", "flex"),
        prediction=("prediction", {"type": "content", "content": "x"}),
        audio=("audio", {"voice": "alloy", "format": "mp3"}),
        web_search_options=("web_search_options", {}),
        reasoning_effort=("reasoning_effort", "high"),
        verbosity=("verbosity", "low"),
        tool_choice=("tool_choice", "required"),
    ),
    "an answer in sound": Bad({"modalities": ["text", "audio"]}, "modalities.1", path=CHAT),
    "an answer in JSON": Bad({"response_format": {"type": "json_object"}}, "response_format.type", path=CHAT),
    "an answer by a schema": Bad(
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
        says="response_format",
        path=CHAT,
    ),
    "an unknown stream option": Bad({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    "stream options that are a list": Bad({"stream": True, "stream_options": []}, "stream_options"),
    # chats
    **fields(
        CHAT,
        no_messages=("messages", ABSENT, "missing"),
        messages_null=("messages", None),
        messages_empty=("messages", []),
        messages_a_text=("messages", "hi"),
        messages_an_object=("messages", MESSAGE),
        logprobs_a_number=("logprobs", 3),
        top_logprobs_without_logprobs=("top_logprobs", 3, "logprobs"),
        max_completion_tokens_0=("max_completion_tokens", 0),
        max_completion_tokens_in_quotes=("max_completion_tokens", "9"),
        a_chat_longer_than_the_context=("messages", [{"role": "user", "content": "x" * 5000}], "5,0"),
        prompt=("prompt", "hi", "not supported"),
    ),
    "top_logprobs of 21": Bad({"logprobs": True, "top_logprobs": 21}, "top_logprobs", path=CHAT),
    **{
        case: Bad({"messages": [MESSAGE, message]}, param, path=CHAT)
        for case, message, param in (
            ("a message is a text", "hi", "messages.1"),
            ("a message is null", None, "messages.1"),
            ("a message has no role", {"content": "hi"}, "messages.1.role"),
            ("a message has no content", {"role": "user"}, "messages.1.content"),
            ("a message's content is null", {"role": "assistant", "content": None}, "messages.1.content"),
            ("a message's content is a number", {"role": "user", "content": 3}, "messages.1.content"),
            ("a message's content is no part", {"role": "user", "content": []}, "messages.1.content"),
            ("a role is unknown", {"role": "king", "content": "hi"}, "messages.1.role"),
            ("a role is a number", {"role": 1, "content": "hi"}, "messages.1.role"),
            ("a message of a tool", {"role": "tool", "content": "hi", "tool_call_id": "1"}, "messages.1.tool_call_id"),
            ("a message with tool calls", {**MESSAGE, "tool_calls": [TOOL]}, "messages.1.tool_calls"),
            ("a message with a name", {**MESSAGE, "name": "Ada"}, "messages.1.name"),
            ("a message with an unknown field", {**MESSAGE, "weight": 1}, "messages.1.weight"),
            ("a picture", {"role": "user", "content": [PICTURE]}, "messages.1.content.0.image_url"),
            (
                "a picture behind a text",
                {"role": "user", "content": [{"type": "text", "text": "see"}, PICTURE]},
                "messages.1.content.1.image_url",
            ),
            (
                "sound",
                {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
                "messages.1.content.0.input_audio",
            ),
            ("a part without a type", {"role": "user", "content": [{"text": "hi"}]}, "messages.1.content.0.type"),
            ("a part without a text", {"role": "user", "content": [{"type": "text"}]}, "messages.1.content.0.text"),
            ("a part that is a text", {"role": "user", "content": ["hi"]}, "messages.1.content.0"),
        )
    },
    # models
    "no model": Bad({"model": ABSENT}, "model", "missing"),
    "the model is null": Bad({"model": None}, "model"),
    "the model is a number": Bad({"model": 4}, "model"),
    "an unknown model": Bad({"model": "gpt-4o"}, "model", "gpt-4o", 404),
    "an unknown model in a chat": Bad({"model": "gpt-4o"}, "model", "gpt-4o", 404, CHAT),
    "the model's name is empty": Bad({"model": ""}, "model", status=404),
    "the model's name is a way out": Bad({"model": "../../etc/passwd"}, "model", status=404),
    "an unknown model in the path": Bad(None, "model", "x", 404, "/v1/models/x", "GET"),
    # bodies
    "no body": Bad(raw("")),
    "an empty object": Bad(raw("{}"), "model", "missing"),
    "a field without a name": Bad(raw('{"": null}'), says="not supported"),
    "a list": Bad(raw("[]"), says="object"),
    "a text": Bad(raw('"hi"'), says="object"),
    "null": Bad(raw("null")),
    "a number": Bad(raw("7"), says="object"),
    "half an object": Bad(raw('{"model": "tiny", "prompt": "h'), says="JSON"),
    "two objects": Bad(raw("{} {}"), says="JSON"),
    "single quotes": Bad(raw("{'model': 'tiny'}"), says="JSON"),
    "a trailing comma": Bad(raw('{"model": "tiny",}'), says="JSON"),
    "NaN": Bad(raw('{"model": "tiny", "prompt": "x", "temperature": NaN}')),
    "minus infinity": Bad(raw('{"model": "tiny", "prompt": "x", "temperature": -Infinity}')),
    "a number beyond all floats": Bad(raw('{"model": "tiny", "prompt": "x", "temperature": 1e999}')),
    "an int of 100,000 digits": Bad(raw('{"model": "tiny", "prompt": "x", "max_tokens": %s}' % ("9" * 100_000))),
    "lists 90,000 deep": Bad(deep(90_000)),
    "objects 30,000 deep": Bad(deep(30_000, "{}")),
    "a field 50,000 deep": Bad(b'{"model": "tiny", "prompt": ' + deep(50_000) + b"}"),
    "a field 900 deep": Bad(b'{"model": "tiny", "prompt": ' + deep(900) + b"}", says="prompt"),
    "broken UTF-8": Bad(b'{"model": "tiny", "prompt": "\xff\xfe"}'),
    "UTF-8 cut in an emoji": Bad(b'{"model": "tiny", "prompt": "\xf0\x9f\x98"}'),
    "half a surrogate pair, escaped": Bad(raw('{"model": "tiny", "prompt": "\\ud83d"}')),
    "half a surrogate pair in a stop string": Bad(raw('{"model": "tiny", "prompt": "x", "stop": "\\ud83d"}')),
    "half a surrogate pair in a salt": Bad(raw('{"model": "tiny", "prompt": "x", "cache_salt": "\\udc00"}')),
    "half a surrogate pair as a field": Bad(raw('{"model": "tiny", "prompt": "x", "\\ud83d": 1}')),
    "half a surrogate pair as a model": Bad(raw('{"model": "\\ud83d", "prompt": "x"}')),
    "half a surrogate pair in bytes": Bad(raw('{"model": "tiny", "prompt": "\ud83d"}')),
    "UTF-16": Bad('{"model": "tiny", "prompt": ""}'.encode("utf-16")),
    "zeros": Bad(bytes(1000)),
    "9 MB of prompt": Bad({"prompt": "x" * 9_000_000}, says="8,000,000", status=413),
    "9 MB of an unknown field": Bad({"padding": "x" * 9_000_000}, says="8,000,000", status=413),
    "10,000 fields": Bad({f"a{i}": 0 for i in range(10_000)}, "a0"),
    "a field's name of 100,000 letters": Bad({"x" * 100_000: 1}, says="not supported"),
    # what is not JSON, and not here
    "a form": Bad(b"model=tiny&prompt=x", None, "content type", 415, content_type="text/plain"),
    "no content type": Bad(raw('{"model": "tiny"}'), None, "content type", 415, content_type=None),
    "XML": Bad(b"<a/>", None, "content type", 415, content_type="application/xml"),
    "a file": Bad(b"--x--", None, "multipart", 415, content_type="multipart/form-data; boundary=x"),
    "a broken content type": Bad(b"{}", None, "content type", 415, content_type=";;;/"),
    "a compressed body": Bad(b"\x1f\x8b\x08\x00"),
    "GET of completions": Bad(None, None, "GET", 405, method="GET"),
    "DELETE of completions": Bad({}, None, "DELETE", 405, method="DELETE"),
    "PATCH of a chat": Bad({}, None, "PATCH", 405, CHAT, "PATCH"),
    "POST of models": Bad({}, None, "POST", 405, "/v1/models"),
    "POST of health": Bad({}, None, "POST", 405, "/health"),
    "a path that is not here": Bad(None, None, "/v1/nothing", 404, "/v1/nothing", "GET"),
    "a path up the tree": Bad(None, None, "", 404, "/page/..%2f..%2fapp.py", "GET"),
    "a path with a zero": Bad(None, None, "", 404, "/v1/%00", "GET"),
    "a path of no UTF-8": Bad(None, None, "", 404, "/v1/%ff%fe", "GET"),
    "a path of 10,000 letters": Bad(None, None, "", 404, "/" + "x" * 10_000, "GET"),
    "embeddings": Bad({"input": "hi", "model": "tiny"}, None, "embeddings", 400, "/v1/embeddings"),
    "assistants": Bad({}, None, "/v1/assistants", 404, "/v1/assistants"),
    # our own routes
    "generate: a chat": Bad({"messages": [MESSAGE]}, "messages", path="/generate"),
    "generate: no prompt": Bad(raw("{}"), "prompt", "missing", path="/generate"),
    "generate: ids beyond the vocabulary": Bad({"prompt": [10**6]}, "prompt", path="/generate"),
    "tokenize: nothing": Bad(raw("{}"), says="prompt", path="/tokenize"),
    "tokenize: both": Bad({"prompt": "x", "messages": [MESSAGE]}, says="either", path="/tokenize"),
    "detokenize: ids beyond the vocabulary": Bad({"tokens": [10**6]}, "tokens", path="/detokenize"),
    "detokenize: words": Bad({"tokens": ["a"]}, "tokens.0", path="/detokenize"),
    "detokenize: nothing": Bad(raw("{}"), "tokens", "missing", path="/detokenize"),
}


def good(path: str) -> dict[str, Any]:
    """A request that is answered."""
    if path == CHAT:
        return {"model": "tiny", "messages": [MESSAGE], "max_tokens": 4, "temperature": 0}
    if path in (COMPLETIONS, "/v1/embeddings"):
        return {"model": "tiny", "prompt": "hello", "max_tokens": 16, "temperature": 0}
    return {"prompt": "hello"} if path == "/generate" else {}


def as_bytes(case: Bad) -> bytes | None:
    """The body as it is sent."""
    if case.body is None or isinstance(case.body, bytes):
        return case.body
    body = good(case.path) | case.body
    return json.dumps({name: value for name, value in body.items() if value is not ABSENT}).encode()


def exchange(server, case: Bad) -> tuple[int, bytes]:
    """Send a request, and read the response, which may come before all of the body is read."""
    body = as_bytes(case)
    with closing(HTTPConnection(urlsplit(server.url).netloc, timeout=PATIENCE_S)) as connection:
        connection.putrequest(case.method, case.path)
        if case.content_type is not None:
            connection.putheader("content-type", case.content_type)
        if body is not None:
            connection.putheader("content-length", str(len(body)))
        connection.endheaders()
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.send(body or b"")
        response = connection.getresponse()
        return response.status, response.read()


def answer(server) -> str:
    """What a good request gets."""
    response = server.ask(COMPLETIONS, good(COMPLETIONS))
    assert response.status == 200, response.text
    return response.json()["choices"][0]["text"]


@pytest.fixture(scope="module")
def usual(server):
    """The answer to a good request."""
    return answer(server)


@pytest.fixture(autouse=True)
def canary(server, usual):
    """After each request the server answers as ever, and nothing is left of it."""
    yield
    assert answer(server) == usual
    assert server.ask("/stats").json()["held"] == 0


def test_there_are_many_of_them():
    assert len(CASES) + len(WIRE) >= 200


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_bad_request_is_refused_with_a_status_and_the_field(server, case):
    status, body = exchange(server, case)
    assert status == case.status, body[:500]
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert case.says in error["message"]
    assert case.param is None or error["param"] == case.param
    assert 0 < len(error["message"]) < 500, "a message for people"


# What is no HTTP, or an odd one.

BODY = json.dumps(good(COMPLETIONS)).encode()


def post(*headers: bytes, body: bytes = BODY, length: bool = True) -> bytes:
    """A request to /v1/completions as it goes over the wire, with these headers besides."""
    lines = [b"POST /v1/completions HTTP/1.1", b"host: x", b"content-type: application/json", *headers]
    lines += [b"content-length: %d" % len(body)] if length else []
    return b"\r\n".join([*lines, b"", body])


def get(target: bytes, version: bytes = b"HTTP/1.1") -> bytes:
    return b"GET %s %s\r\nhost: x\r\n\r\n" % (target, version)


CHUNKED = b"transfer-encoding: chunked"
IN_CHUNKS = b"%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)

# Each with the status of the response.
WIRE: dict[str, tuple[bytes, int]] = {
    "all bytes there are": (bytes(range(256)) * 10, 400),
    "the beginning of TLS": (bytes.fromhex("16030100c8010000c40303") + bytes(200), 400),
    "the beginning of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "a method that nobody has heard of": (b"BREW / HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "a version of the future": (get(b"/health", b"HTTP/3.0"), 400),
    "a tunnel": (b"CONNECT example.com:80 HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "an echo": (b"TRACE / HTTP/1.1\r\nhost: x\r\n\r\n", 405),
    "a target of bytes": (get(b"/\xff\xfe"), 400),
    "a target without a path": (get(b"http://"), 400),
    "a target of a megabyte": (get(b"/" + b"x" * 10**6), 400),
    "a broken escape": (get(b"/%zz"), 404),
    "a negative length": (post(b"content-length: -5", length=False), 400),
    "a length that is a word": (post(b"content-length: many", length=False), 400),
    "a length of 90 bits": (post(b"content-length: 99999999999999999999999999", length=False), 400),
    "a long body that waits for leave": (
        post(b"expect: 100-continue", b"content-length: 999999999", length=False),
        413,
    ),
    "two lengths": (post(b"content-length: 5"), 400),
    "a length and chunks": (post(CHUNKED), 400),
    "a chunk's size is a word": (post(CHUNKED, length=False, body=b"zz\r\nhello\r\n"), 400),
    "a chunk of 72 bits": (post(CHUNKED, length=False, body=b"f" * 18 + b"\r\nhello\r\n"), 400),
    "chunks of more bytes than allowed": (
        post(CHUNKED, length=False, body=(b"186A0\r\n" + b" " * 100_000 + b"\r\n") * 81 + b"0\r\n\r\n"),
        413,
    ),
    "an unknown coding": (post(b"transfer-encoding: gzip"), 400),
    "a header with a zero": (post(b"x: a\0b"), 400),
    "a header without a colon": (post(b"hello"), 400),
    "a header with a space in its name": (post(b"x y: z"), 400),
    "a header over two lines": (post(b"x: a\r\n b"), 400),
    "line ends of Unix": (post().replace(b"\r\n", b"\n"), 400),
    "50,000 headers": (post(*[b"x-%d: y" % i for i in range(50_000)]), 400),
    "a header of a megabyte": (post(b"x: " + b"y" * 10**6), 400),
}


def dial(server) -> socket.socket:
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=PATIENCE_S)


def response(line: socket.socket) -> HTTPResponse:
    """The next response that comes on a connection."""
    answer = HTTPResponse(line)
    answer.begin()
    return answer


@pytest.mark.parametrize(("data", "status"), WIRE.values(), ids=WIRE)
def test_odd_http_gets_a_response(server, data, status):
    with dial(server) as line:
        with suppress(BrokenPipeError, ConnectionResetError):
            line.sendall(data)
        assert response(line).status == status


def test_requests_in_one_go_are_answered_in_their_order(server, usual):
    with dial(server) as line:
        line.sendall(post() + get(b"/health") + post(body=b"{}") + post(b"connection: close"))
        received = b"".join(iter(lambda: line.recv(65536), b""))

    assert re.findall(rb"HTTP/1.1 (\d+)", received) == [b"200", b"200", b"400", b"200"]
    assert [json.loads(text) for text in re.findall(rb'"text":(".*?"),"logprobs"', received)] == [usual, usual]


def test_garbage_behind_a_request_ends_the_connection_only(server):
    with dial(server) as line:
        line.sendall(post() + b"\0\1\2\3\r\n\r\n")
        while line.recv(65536):
            pass


HALVES = {
    "nothing": b"",
    "half a line": b"POST /v1/comp",
    "half the headers": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-",
    "no body": post(b"content-length: 100", length=False, body=b""),
    "half a body": post(b"content-length: 100", length=False, body=b'{"model": "ti'),
    "half a chunk": post(CHUNKED, length=False, body=b'64\r\n{"model": "ti'),
    "some chunks and no end": post(CHUNKED, length=False, body=b"5\r\nhello\r\n" * 3),
}


@pytest.mark.parametrize("sent", HALVES.values(), ids=HALVES)
def test_half_a_request_and_then_silence_holds_nobody_up(server, usual, sent):
    lines = [dial(server) for _ in range(40)]  # more than there are places in batch and queue
    try:
        for line in lines:
            line.sendall(sent)
        assert answer(server) == usual
    finally:
        for line in lines:
            line.close()


@pytest.mark.parametrize("sent", HALVES.values(), ids=HALVES)
def test_half_a_request_and_then_a_reset_is_forgotten(server, sent):
    with dial(server) as line:
        line.sendall(sent)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() sends a reset


def test_a_body_that_never_ends_is_given_up(monkeypatch):
    """With less patience than the server has, hence without a server."""
    monkeypatch.setattr(gate, "BODY_TIMEOUT_S", 0.05)

    async def app(scope, receive, send):
        while (await receive())["more_body"]:
            pass

    async def receive():
        if parts:
            return parts.pop()
        await asyncio.sleep(3600)

    parts = [{"type": "http.request", "body": b"{", "more_body": True}] * 3
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-type", b"application/json")]}
    with pytest.raises(ApiError, match="did not come") as caught:
        asyncio.run(gate.Gate(app, ServerConfig(), Counter())(scope, receive, None))
    assert caught.value.status_code == 408


def test_a_head_that_never_ends_is_given_up(monkeypatch):
    """With less patience than the server has, hence without a server."""
    monkeypatch.setattr(http, "HEAD_TIMEOUT_S", 0.05)

    async def ok(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def scenario() -> list[bytes]:
        config, state = uvicorn.Config(ok, http=http.HttpProtocol, log_config=None), ServerState()
        protocol = partial(http.HttpProtocol, config=config, server_state=state, app_state={})
        listener = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
        received = []
        for sent in (b"", get(b"/x")[:-2], get(b"/x") + b"GET /y"):
            reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
            writer.write(sent)
            received.append(await reader.read())
            writer.close()
        listener.close()
        return received

    nothing, half, one_and_half = asyncio.run(scenario())
    assert (nothing, half) == (b"", b"")
    assert one_and_half.startswith(b"HTTP/1.1 200 OK")


def test_while_a_long_prompt_is_tokenized_others_are_answered(server, usual):
    long = Bad({"prompt": "hello world " * 60_000}, "prompt", "720,000")
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(exchange, server, long)
        wait_until(lambda: refused.done() or server.ask("/stats").json()["held"] == 1)
        answers = [answer(server) for _ in range(3)]
        assert not refused.done(), "too short a prompt to show anything"
        assert refused.result()[0] == 400
    assert answers == [usual] * 3
