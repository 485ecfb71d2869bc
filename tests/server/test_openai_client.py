"""OpenAI's own client: its four ways to ask are one, its classes know our errors, its helpers understand our answers.

What each field means, and the bytes of the answers: test_api.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import PATIENCE_S, wait_until
from tests.server.test_api import CHAT, FIELDS, HARMLESS, HARMLESS_CHAT, PROMPT

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.xdist_group("server")

LONG = {"model": "tiny", "prompt": "x", "max_tokens": 1000, "temperature": 0, "extra_body": {"ignore_eos": True}}
MORE = {  # fields of one route only, or of another kind than those of test_api
    "logprobs": ({"logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
    "logprobs without others": ({"logprobs": 0}, {"logprobs": True}),
    "max_completion_tokens": ({"max_tokens": 4}, {"max_completion_tokens": 4}),
    "what asks for nothing": (HARMLESS, HARMLESS_CHAT),
    "all at once": (
        {"n": 2, "stop": ["e", "é"], "logprobs": 1, "presence_penalty": 1, "extra_body": {"top_k": 40, "min_p": 0.01}},
        {"n": 2, "stop": ["e", "é"], "logprobs": True, "extra_body": {"top_k": 40, "min_p": 0.01}, "top_p": 0.9},
    ),
}
CASES = {name: (asked, asked) for name, (asked, _) in FIELDS.items() if name != "nulls"} | MORE


@pytest.fixture(params=["sync", "async"])
def ask(request, base_url) -> Callable[..., Any]:
    """ask("completions", …): the whole answer, or the list of a stream's chunks, by either of the two clients."""
    options = {"base_url": base_url, "api_key": "none", "max_retries": 0, "timeout": PATIENCE_S}

    def plainly(route: str, **fields: Any) -> Any:
        with openai.OpenAI(**options) as client:
            answer = resource(client, route).create(**fields)
            return list(answer) if fields.get("stream") else answer

    async def awaited(route: str, **fields: Any) -> Any:
        async with openai.AsyncOpenAI(**options) as client:
            answer = await resource(client, route).create(**fields)
            return [chunk async for chunk in answer] if fields.get("stream") else answer

    def resource(client: Any, route: str) -> Any:
        return {"completions": client.completions, "chat": client.chat.completions, "embeddings": client.embeddings}[
            route
        ]

    return plainly if request.param == "sync" else lambda route, **fields: asyncio.run(awaited(route, **fields))


def joined(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """Text, reason and logprobs by a choice's index, of a stream's chunks or of one whole answer."""
    said = dict[int, dict[str, Any]]()
    for chunk in chunks:
        for choice in chunk.choices:
            one = said.setdefault(choice.index, {"text": "", "reason": None, "logprobs": []})
            words = getattr(choice, "delta", None) or getattr(choice, "message", None)
            one["text"] += (words.content or "") if words else getattr(choice, "text", "")
            one["reason"] = choice.finish_reason
            if shown := choice.logprobs:
                one["logprobs"] += getattr(shown, "content", None) or shown.tokens or []
    for one in said.values():
        one["logprobs"] = [entry if isinstance(entry, str) else entry.token for entry in one["logprobs"]]
    return said


@pytest.mark.parametrize("route", ["completions", "chat"])
@pytest.mark.parametrize("case", CASES)
def test_a_stream_joins_to_the_whole_answer_with_every_field(ask, route, case):
    fields = {"model": "tiny", "seed": 7, "max_tokens": 12} | CASES[case][route == "chat"]
    fields |= {"prompt": PROMPT} if route == "completions" else {"messages": CHAT}
    if "max_completion_tokens" in fields:
        del fields["max_tokens"]

    whole = ask(route, **fields)
    *chunks, last = ask(route, **fields, stream=True, stream_options={"include_usage": True})

    kinds = openai.types, openai.types.chat
    assert type(whole) is (kinds[1].ChatCompletion if route == "chat" else kinds[0].Completion)
    assert {type(chunk) for chunk in chunks} == {
        kinds[1].ChatCompletionChunk if route == "chat" else kinds[0].Completion
    }
    assert joined(chunks) == joined([whole])
    assert len(whole.choices) == fields.get("n", 1)
    assert all(choice.finish_reason in ("stop", "length") for choice in whole.choices)
    assert {chunk.id for chunk in [*chunks, last]} == {last.id}
    assert last.choices == []
    assert last.usage.prompt_tokens_details.cached_tokens >= 0
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [getattr(last.usage, name) for name in counts] == [getattr(whole.usage, name) for name in counts]
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


ERRORS = {
    "a value out of range": ("completions", {"prompt": "x", "temperature": 3}, "BadRequestError", 400, "temperature"),
    "a wrong type": ("completions", {"prompt": "x", "max_tokens": "4"}, "BadRequestError", 400, "max_tokens"),
    "an unknown field": ("chat", {"messages": CHAT, "extra_body": {"abc": 1}}, "BadRequestError", 400, "abc"),
    "a field not served": (
        "chat",
        {"messages": CHAT, "reasoning_effort": "low"},
        "BadRequestError",
        400,
        "reasoning_effort",
    ),
    "too long a prompt": ("completions", {"prompt": [5] * 2000}, "BadRequestError", 400, "prompt"),
    "tools": (
        "chat",
        {"messages": CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]},
        "BadRequestError",
        400,
        "tools",
    ),
    "another model": ("chat", {"messages": CHAT, "model": "gpt-4o"}, "NotFoundError", 404, "model"),
    "embeddings": ("embeddings", {"input": "x"}, "BadRequestError", 400, None),
    "a body too long": ("completions", {"prompt": "x" * 9_000_000}, "APIStatusError", 413, None),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", ERRORS)
def test_an_error_is_of_the_clients_class_for_it(ask, case, stream):
    route, fields, kind, status, param = ERRORS[case]
    if route != "embeddings":
        fields = fields | {"stream": stream}
    with pytest.raises(getattr(openai, kind)) as caught:
        ask(route, **({"model": "tiny"} | fields))

    assert (caught.value.status_code, caught.value.param) == (status, param)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id.startswith("req_")


def test_a_full_queue_is_a_rate_limit_and_who_tries_again_is_answered(server, base_url):
    async def scenario() -> tuple[openai.RateLimitError, Any]:
        options = {"base_url": base_url, "api_key": "x", "timeout": PATIENCE_S}
        async with openai.AsyncOpenAI(**options, max_retries=0) as client:
            held = [asyncio.ensure_future(client.completions.create(**LONG, n=8)) for _ in range(4)]
            while server.ask("/stats").json()["held"] < 32:
                await asyncio.sleep(0.02)
            with pytest.raises(openai.RateLimitError) as caught:
                await client.completions.create(model="tiny", prompt="x")
            patient = client.with_options(max_retries=100).completions.create(model="tiny", prompt="x", max_tokens=2)
            patient = asyncio.ensure_future(patient)
            await asyncio.sleep(0.1)
            for answer in held:
                answer.cancel()
            return caught.value, await patient

    error, answer = asyncio.run(scenario())
    assert (error.response.headers["retry-after"], error.code, error.type) == ("1", "queue_full", "rate_limit_error")
    assert answer.usage.completion_tokens == 2


def test_nobody_at_the_port_is_a_connection_error():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0) as client,
        pytest.raises(openai.APIConnectionError),
    ):
        client.models.list()


def test_a_client_out_of_patience_leaves_nothing_running(server, client):
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(**LONG, n=8, timeout=0.05)
    wait_until(lambda: server.ask("/stats").json()["held"] == 0)
    wait_until(lambda: server.ask("/stats").json()["running"] == 0)  # the engine hears of it behind the front


def test_a_stream_that_is_closed_ends_in_the_engine(server, base_url, client):
    async def first_of(n: int) -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="x") as client:
            stream = await client.completions.create(**LONG, n=n, stream=True)
            await stream.__anext__()
            await stream.close()

    with client.completions.create(**LONG, n=8, stream=True) as stream:
        next(iter(stream))
    wait_until(lambda: server.ask("/stats").json()["held"] == 0)
    asyncio.run(first_of(8))
    wait_until(lambda: server.ask("/stats").json()["running"] == 0)


def test_models_are_listed_and_found(base_url, client):
    async def names() -> list[str]:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="x") as client:
            return [model.id async for model in client.models.list()]

    assert [model.id for model in client.models.list()] == ["tiny"] == asyncio.run(names())
    assert client.models.retrieve("tiny").owned_by == "minisgl"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")


def test_the_clients_helper_for_streams_gathers_the_answer(client):
    fields = {"model": "tiny", "messages": CHAT, "temperature": 0, "max_tokens": 20}
    text = client.chat.completions.create(**fields).choices[0].message.content
    with client.chat.completions.stream(**fields, stop=text[8:10]) as stream:  # an end for "length" is its error
        kinds = {event.type for event in stream}
        gathered = stream.get_final_completion().choices[0]

    before = text[: text.index(text[8:10])]
    assert (gathered.message.content, gathered.finish_reason, gathered.message.role) == (before, "stop", "assistant")
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_raw_responses_have_an_id_and_the_body(client):
    response = client.completions.with_raw_response.create(model="tiny", prompt="x", max_tokens=2)
    assert response.headers["x-request-id"].startswith("req_")
    assert response.headers["content-type"] == "application/json"
    assert response.parse().usage.completion_tokens == 2
