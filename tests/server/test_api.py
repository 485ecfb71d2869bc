"""The API as OpenAI's own client sees it, and as its bytes are; what is answered is what the LLM answers."""

from __future__ import annotations

import asyncio
import json
from itertools import chain

import pytest

from minisgl import SamplingParams
from tests.server.conftest import PATIENCE_S, events

pytestmark = pytest.mark.xdist_group("server")

PROMPT = "Once upon a time there was 🦙 and 你好"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Héllo"}]
GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 12}

# OpenAI's fields, those of others that are served too, and what they mean to the engine. All are asked with a seed.
FIELDS = {
    "temperature": ({"temperature": 0.7}, {"temperature": 0.7}),
    "no temperature": ({}, {}),
    "greedy": ({"temperature": 0}, {"temperature": 0}),
    "top_p": ({"top_p": 0.5}, {"top_p": 0.5}),
    "top_p 0": ({"top_p": 0}, {"temperature": 0}),
    "presence_penalty": ({"presence_penalty": 2}, {"presence_penalty": 2}),
    "frequency_penalty": ({"frequency_penalty": 1.5}, {"frequency_penalty": 1.5}),
    "logit_bias": ({"logit_bias": {"70": 90, "71": -100}}, {"logit_bias": {70: 90, 71: -100}}),
    "max_tokens": ({"max_tokens": 3}, {"max_tokens": 3}),
    "n": ({"n": 3}, {"n": 3}),
    "a negative seed": ({"seed": -1}, {"seed": 2**63 - 1}),
    "a stop string": ({"stop": "e"}, {"stop": "e"}),
    "stop strings": ({"stop": ["zz", "a", "b"], "max_tokens": 40}, {"stop": ["zz", "a", "b"], "max_tokens": 40}),
    "top_k": ({"extra_body": {"top_k": 3}}, {"top_k": 3}),
    "top_k -1": ({"extra_body": {"top_k": -1}}, {}),
    "min_p": ({"extra_body": {"min_p": 0.2}}, {"min_p": 0.2}),
    "repetition_penalty": ({"extra_body": {"repetition_penalty": 1.8}}, {"repetition_penalty": 1.8}),
    "stop_token_ids": ({"extra_body": {"stop_token_ids": [*range(4, 130)]}}, {"stop_token_ids": [*range(4, 130)]}),
    "end of sequence": ({"logit_bias": {"0": 100}}, {"logit_bias": {0: 100}}),
    "ignore_eos": (
        {"logit_bias": {"0": 100}, "extra_body": {"ignore_eos": True}},
        {"logit_bias": {0: 100}, "ignore_eos": True},
    ),
    "min_tokens": (
        {"logit_bias": {"0": 100}, "extra_body": {"min_tokens": 4}},
        {"logit_bias": {0: 100}, "min_tokens": 4},
    ),
    "priority": ({"extra_body": {"priority": -3}}, {}),
    "nulls": ({"extra_body": {"top_k": None, "stop": None, "n": None, "logit_bias": None, "stream": None}}, {}),
}
HARMLESS = {"user": "ada", "extra_body": {"best_of": 1, "echo": False, "suffix": None}}
HARMLESS_CHAT = {
    "user": "ada",
    "metadata": {"a": "b"},
    "store": False,
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "service_tier": "auto",
    "modalities": ["text"],
    "tools": [],
    "tool_choice": "none",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
}


def expected(llm, prompt, **params):
    """What the LLM answers to OpenAI's defaults and these."""
    return llm.generate(prompt, SamplingParams(**({"temperature": 1.0, "seed": 7, "max_tokens": 12} | params)))


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_completions_means_what_it_means_to_the_engine(client, llm, field):
    asked, params = FIELDS[field]
    answer = client.completions.create(**({"model": "tiny", "prompt": PROMPT, "seed": 7, "max_tokens": 12} | asked))

    wanted = expected(llm, PROMPT, **params)
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [
        (i, completion.text, completion.finish_reason) for i, completion in enumerate(wanted)
    ]
    assert answer.usage.completion_tokens == sum(len(completion.token_ids) for completion in wanted)


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_a_streamed_chat_means_what_it_means_to_the_engine(client, llm, field):
    asked, params = FIELDS[field]
    fields = {"model": "tiny", "messages": CHAT, "seed": 7, "max_tokens": 12} | asked
    if "extra_body" in fields:  # the client's own stream=True must stay
        fields["extra_body"] = {k: v for k, v in fields["extra_body"].items() if k != "stream"}
    chunks = [*client.chat.completions.create(**fields, stream=True)]

    wanted = expected(llm, CHAT, **params)
    for i, completion in enumerate(wanted):
        choices = [c.choices[0] for c in chunks if c.choices[0].index == i]
        assert choices[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in choices) == completion.text
        assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + [completion.finish_reason]


def test_a_chat_answers_as_the_llm_does(client, llm):
    answer = client.chat.completions.create(messages=CHAT, **GREEDY)
    [wanted] = expected(llm, CHAT, temperature=0)

    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", wanted.text, "length")
    assert (answer.object, answer.model, answer.usage.total_tokens) == (
        "chat.completion",
        "tiny",
        wanted.prompt_tokens + 12,
    )


def test_async_clients_are_served_side_by_side(base_url, llm):
    openai = pytest.importorskip("openai")

    async def ask(client, prompt):
        stream = await client.completions.create(prompt=prompt, stream=True, **GREEDY)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all(prompts):
        async with openai.AsyncOpenAI(base_url=base_url, api_key="x", timeout=PATIENCE_S) as client:
            return await asyncio.gather(*(ask(client, prompt) for prompt in prompts))

    prompts = [f"{i}: {PROMPT}" for i in range(12)]
    assert asyncio.run(ask_all(prompts)) == [c.text for c in llm.generate(prompts, SamplingParams(max_tokens=12))]


def test_a_completion_without_max_tokens_has_16_and_a_chat_as_many_as_fit(client):
    ignore = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}
    short = client.completions.create(prompt="x", **ignore)
    long = client.chat.completions.create(messages=CHAT, **ignore)

    assert (short.usage.completion_tokens, short.choices[0].finish_reason) == (16, "length")
    assert (long.usage.total_tokens, long.choices[0].finish_reason) == (1024, "length")


def test_max_completion_tokens_is_max_tokens(client):
    answer = client.chat.completions.create(model="tiny", messages=CHAT, max_completion_tokens=5, seed=1)
    assert answer.usage.completion_tokens == 5


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_of_all_forms_are_answered_in_their_order(client, llm, stream):
    ids = llm.encode(PROMPT)
    for prompt in (PROMPT, ids, [PROMPT, "b"], [ids, [5, 6]]):
        answer = client.completions.create(prompt=prompt, stream=stream, n=2, **GREEDY)
        texts = ["", "", "", ""]
        for part in answer if stream else [answer]:
            for choice in part.choices:
                texts[choice.index] += choice.text
        many = prompt if isinstance(prompt[0], str | list) and not isinstance(prompt, str) else [prompt]
        wanted = llm.generate(many, SamplingParams(max_tokens=12, n=2))
        assert [text for text in texts if text] == [completion.text for completion in wanted]


def test_the_frames_of_a_stream_are_openais(server, llm):
    body = GREEDY | {"prompt": PROMPT, "stream": True, "stream_options": {"include_usage": True}}
    answer = server.ask("/v1/completions", body)
    [wanted] = expected(llm, PROMPT, temperature=0)

    *chunks, last, done = events(answer.text)
    chunks, last = [json.loads(chunk) for chunk in chunks], json.loads(last)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert done == "[DONE]"
    assert len({(c["id"], c["created"], c["object"], c["model"]) for c in [*chunks, last]}) == 1
    assert [c["usage"] for c in chunks] == [None] * len(chunks)
    assert "".join(c["choices"][0]["text"] for c in chunks) == wanted.text
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12
    assert last["usage"]["prompt_tokens"] == wanted.prompt_tokens


def test_without_include_usage_no_chunk_speaks_of_it(server):
    frames = events(server.ask("/v1/chat/completions", GREEDY | {"messages": CHAT, "stream": True}).text)

    assert frames.pop() == "[DONE]"
    assert all(frame["choices"] and "usage" not in frame for frame in map(json.loads, frames))


@pytest.mark.parametrize("stream", [False, True])
def test_usage_tells_what_the_prefix_cache_had_unless_the_salt_differs(client, stream):
    prompt = f"{stream}: a prompt that nobody has asked before. " * 3

    def cached(**extra) -> int:
        options = {"stream_options": {"include_usage": True}} if stream else {}
        answer = client.completions.create(prompt=prompt, stream=stream, extra_body=extra, **options, **GREEDY)
        *_, last = answer if stream else [answer]
        return last.usage.prompt_tokens_details.cached_tokens

    whole_pages = len(prompt.encode()) // 16 * 16
    assert [cached(), cached(), cached(cache_salt=f"mine {stream}")] == [0, whole_pages, 0]


# Logprobs


def test_logprobs_of_a_completion_are_the_engines(client, llm):
    answer = client.completions.create(prompt=PROMPT, logprobs=2, **GREEDY)
    [wanted] = expected(llm, PROMPT, temperature=0, logprobs=2)

    shown = answer.choices[0].logprobs
    assert shown.token_logprobs == pytest.approx([token.logprob for token in wanted.logprobs], abs=1e-4)
    assert [len(top) for top in shown.top_logprobs] == [2] * 12
    assert [top[token] for top, token in zip(shown.top_logprobs, shown.tokens, strict=True)] == shown.token_logprobs


def test_tokens_of_a_completion_lie_where_their_offsets_say(client):
    answer = client.completions.create(prompt=PROMPT, logprobs=0, seed=3, model="tiny", max_tokens=60)

    [choice] = answer.choices
    shown = choice.logprobs
    assert shown.text_offset[0] == 0
    assert shown.text_offset == sorted(shown.text_offset)
    for token, offset in zip(shown.tokens, shown.text_offset, strict=True):
        if not token.startswith(("bytes:", "<")):
            assert choice.text[offset : offset + len(token)] == token


def test_the_bytes_of_a_chats_tokens_are_the_text(client, llm):
    emoji = "🦙"
    bias = {str(i): 100 - n for n, i in enumerate(llm.encode(emoji)[1:])}
    answer = client.chat.completions.create(
        messages=CHAT, model="tiny", logprobs=True, top_logprobs=3, max_tokens=8, seed=1, logit_bias=bias
    )

    [choice] = answer.choices
    tokens = choice.logprobs.content
    assert len(tokens) == answer.usage.completion_tokens == 8
    assert bytes(b for token in tokens for b in token.bytes).decode("utf-8", "replace") == choice.message.content
    assert all(token.token == "bytes:" + "".join(f"\\x{b:02x}" for b in token.bytes) for token in tokens)
    assert all(len(token.top_logprobs) == 3 for token in tokens)


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_streamed_logprobs_are_those_of_the_whole_answer(server, route):
    about = {"/v1/completions": {"prompt": PROMPT, "logprobs": 2}, "/generate": {"prompt": PROMPT, "logprobs": 2}}
    about["/v1/chat/completions"] = {"messages": CHAT, "logprobs": True, "top_logprobs": 2}
    body = {k: v for k, v in GREEDY.items() if route != "/generate" or k != "model"} | about[route]
    [whole] = server.ask(route, body).json()["choices"]
    chunks = [json.loads(e)["choices"] for e in events(server.ask(route, body | {"stream": True}).text)[:-1]]

    shown = [choices[0]["logprobs"] for choices in chunks if choices and choices[0]["logprobs"]]
    if route == "/generate":
        assert [*chain(*shown)] == whole["logprobs"]
    else:
        for name, values in whole["logprobs"].items():
            assert values is None or [*chain(*(part[name] for part in shown))] == values


def test_a_logprob_of_minus_infinity_is_a_number(server, llm):
    params = {"prompt": "x", "logprobs": 2, "logit_bias": {str(i): -100 for i in range(4, 300)}}
    text = server.ask("/v1/completions", GREEDY | params).text

    assert "Infinity" not in text
    assert "null" not in json.dumps(json.loads(text)["choices"][0]["logprobs"])


# Chats


@pytest.mark.parametrize(
    "same",
    [
        [CHAT[0], {"role": "user", "content": [{"type": "text", "text": "Héllo"}]}],
        [{"role": "developer", "content": "Be brief."}, CHAT[1]],
    ],
)
def test_a_chat_may_be_worded_in_several_ways(client, same):
    answers = [client.chat.completions.create(messages=chat, **GREEDY) for chat in (CHAT, same)]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


def test_texts_of_several_parts_are_lines(server):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    one, other = (
        server.ask("/tokenize", {"messages": [{"role": "user", "content": content}]}).json()["tokens"]
        for content in (parts, "a\nb")
    )
    assert one == other


def test_fields_that_ask_for_nothing_are_accepted(client):
    plain = client.completions.create(prompt="x", **GREEDY)
    chat = client.chat.completions.create(messages=CHAT, **GREEDY)

    assert client.completions.create(prompt="x", **GREEDY, **HARMLESS).choices == plain.choices
    assert client.chat.completions.create(messages=CHAT, **GREEDY, **HARMLESS_CHAT).choices == chat.choices


# The other routes


def test_the_model_is_listed_by_the_name_it_is_served_under(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_generate_gives_ids_and_text(server, llm):
    [wanted] = expected(llm, PROMPT, temperature=0)
    answer = server.ask("/generate", {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}).json()

    [choice] = answer["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == (wanted.text, wanted.token_ids, "length")
    assert answer["usage"]["prompt_tokens"] == wanted.prompt_tokens


def test_generate_streams_ids_with_the_text(server, llm):
    [wanted] = expected(llm, PROMPT, temperature=0)
    body = {"prompt": llm.encode(PROMPT), "max_tokens": 12, "temperature": 0, "stream": True}
    *chunks, last, done = events(server.ask("/generate", body).text)

    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    assert done == "[DONE]"
    assert [*chain(*(choice["token_ids"] for choice in choices))] == wanted.token_ids
    assert "".join(choice["text"] for choice in choices) == wanted.text
    assert json.loads(last)["usage"]["completion_tokens"] == 12


def test_what_tokenize_gives_detokenize_takes_back(server, llm):
    tokens = server.ask("/tokenize", {"prompt": PROMPT}).json()
    assert tokens == {"count": len(llm.encode(PROMPT)), "max_model_len": 1024, "tokens": llm.encode(PROMPT)}
    assert server.ask("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": PROMPT}


def test_a_chat_is_tokenized_through_its_template(server, llm):
    assert server.ask("/tokenize", {"messages": CHAT}).json()["tokens"] == llm.encode(CHAT)


def test_stats_tell_of_engine_and_front(server):
    before = server.ask("/stats").json()
    server.ask("/v1/completions", GREEDY | {"prompt": "count me"})
    after = server.ask("/stats").json()

    assert after["generation_tokens"] - before["generation_tokens"] == 12
    assert after["steps"] >= before["steps"] + 12
    assert after["pages"] == 256
    assert (after["running"], after["waiting"], after["held"]) == (0, 0, 0)


def test_every_response_has_an_id_of_its_own(server):
    ids = {server.ask(path).headers["x-request-id"] for path in ("/health", "/v1/models", "/no/such/path", "/health")}
    assert len(ids) == 4


def test_the_schema_names_every_route_and_the_form_of_errors(server):
    schema = server.ask("/openapi.json").json()

    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/generate", "/health"} <= schema["paths"].keys()
    for path, methods in schema["paths"].items():
        for method in methods.values():
            assert "422" not in method["responses"], path
            error = method["responses"]["default"]["content"]["application/json"]["schema"]
            assert error == {"$ref": "#/components/schemas/ErrorBody"}
    assert schema["components"]["schemas"]["ChatRequest"]["additionalProperties"] is False
