"""What a stream says is what the whole answer says: text, usage, finish reason and logprobs, for 200 random prompts.

The model's vocabulary is bytes, so that every character beyond ASCII is cut, and the answers are pushed towards the
bytes of a few characters, so that whole and broken ones come.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
from dataclasses import dataclass, field
from http.client import HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from tests.server.conftest import PATIENCE_S, events, wait_until
from tests.tiny_tokenizer import SPECIALS, byte_level_tokenizer

pytestmark = pytest.mark.xdist_group("server")

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PIECES = [
    *"aeiou.,! ",
    "the ",
    "\n",
    "é",
    "ß",
    "и",
    "你",
    "好",
    "日本",
    "한",
    "ก็",
    "ं",
    "א",
    "😀",
    "👩‍👩‍👧",
    "🇩🇪",
    "👍🏽",
]
NEVER = ["a stop string that never comes", "😀😀😀😀😀😀😀😀"]


@dataclass
class Said:
    """One answer."""

    text: str = ""
    finish_reason: str | None = None
    tokens: list[bytes] = field(default_factory=list)  # what the logprobs name, without what the text leaves out
    logprobs: list[float] = field(default_factory=list)
    num_chunks: int = 0

    def add(self, choice: dict[str, Any]) -> None:
        """Take a choice, or a stream's next part of it."""
        assert self.finish_reason is None, "something came after the end"
        self.finish_reason = choice["finish_reason"]
        self.text += (
            choice["text"] if "text" in choice else (choice.get("message") or choice["delta"]).get("content", "")
        )
        self.num_chunks += 1
        shown = choice["logprobs"] or {}
        self.logprobs += shown.get("token_logprobs") or [entry["logprob"] for entry in shown.get("content", [])]
        self.tokens += map(as_bytes, shown.get("tokens") or [entry["token"] for entry in shown.get("content", [])])


def as_bytes(token: str) -> bytes:
    if token in SPECIALS or re.fullmatch(r"<\d+>", token):
        return b""
    return bytes.fromhex(token.removeprefix("bytes:").replace("\\x", "")) if len(token) > 1 else token.encode()


def choices_said(bodies: list[dict[str, Any]]) -> list[Said]:
    """The answers of a body, or of all chunks of a stream."""
    said = dict[int, Said]()
    for body in bodies:
        for choice in body["choices"]:
            said.setdefault(choice["index"], Said()).add(choice)
    return [said[i] for i in sorted(said)]


async def ask(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> tuple[list[Said], dict[str, int]]:
    """The answers, whole or streamed as the body asks, and the usage."""
    async with session.post(path, json=body) as response:
        text = await response.text()
    assert response.status == 200, text
    if not body.get("stream"):
        return choices_said([json.loads(text)]), json.loads(text)["usage"]
    *frames, done = events(text)
    assert done == "[DONE]"
    chunks = [json.loads(frame) for frame in frames]
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    return choices_said(chunks), chunks[-1]["usage"]


def draw(number: int) -> tuple[str, dict[str, Any]]:
    """A route and a request."""
    rng, tokenizer = random.Random(number), byte_level_tokenizer()
    prompt = "".join(rng.choices(PIECES, k=rng.randint(1, 40)))
    path = COMPLETIONS if number % 2 else CHAT
    body: dict[str, Any] = {"model": "tiny", "seed": number, "max_tokens": rng.randint(1, 32)}
    body |= {"prompt": prompt} if path == COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}
    body |= {"temperature": rng.choice([0, 0.5, 1, 1, 2]), "n": rng.choice([1, 1, 1, 3])}
    if alphabet := rng.choice(["", "é", "中", "🟠", "éa", "中é", "🟠"]):
        ids = tokenizer(alphabet, add_special_tokens=False)["input_ids"]
        body["logit_bias"] = {str(token): 60 for token in ids}
    if rng.random() < 0.4:
        body["logprobs"] = 2 if path == COMPLETIONS else True
    return path, body


def cut(said: Said, stop: list[str]) -> tuple[str, str | None]:
    """What a stop string leaves of an answer."""
    found = [at for word in stop if (at := said.text.find(word)) >= 0]
    return (said.text[: min(found)], "stop") if found else (said.text, said.finish_reason)


async def check(session: aiohttp.ClientSession, number: int) -> list[Said]:
    """One prompt, whole and streamed, and again with stop strings that come in its answers, as most do."""
    path, body = draw(number)
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    whole, usage = await ask(session, path, body)
    streamed, counted = await ask(session, path, body | stream)

    same = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [counted[name] for name in same] == [usage[name] for name in same]
    for one, other in zip(whole, streamed, strict=True):
        assert (one.text, one.finish_reason, one.tokens) == (other.text, other.finish_reason, other.tokens)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        if "logprobs" in body:
            assert b"".join(one.tokens).decode(errors="replace") == one.text
            assert len(one.logprobs) == len(one.tokens)

    rng, text = random.Random(number), whole[0].text
    at = rng.randrange(max(1, len(text)))
    stop = [*rng.sample(NEVER, rng.randint(0, 2)), *filter(None, [text[at : at + rng.randint(1, 4)]])] or NEVER
    with_stop = body | {"stop": stop[0] if len(stop) == 1 else stop}
    expected = [cut(said, stop) for said in whole]
    short, usage = await ask(session, path, with_stop)
    assert [(said.text, said.finish_reason) for said in short] == expected
    streamed, counted = await ask(session, path, with_stop | stream)
    assert [(said.text, said.finish_reason) for said in streamed] == expected
    assert [counted[name] for name in same] == [usage[name] for name in same]
    assert [said.tokens for said in streamed] == [said.tokens for said in short]
    return whole


def test_streams_say_what_whole_answers_say(server):
    async def all_of_them() -> list[Said]:
        connector = aiohttp.TCPConnector(limit=8)  # three answers each fit into batch and queue
        async with aiohttp.ClientSession(server.url, connector=connector) as session:
            checked = await asyncio.gather(*(check(session, number) for number in range(200)))
        return [said for answers in checked for said in answers]

    said = asyncio.run(all_of_them())

    texts = "".join(answer.text for answer in said)
    assert set("🟠中é�") <= set(texts), "no whole characters of each length, or no broken ones"
    assert {answer.finish_reason for answer in said} == {"length", "stop"}
    assert any(answer.tokens for answer in said)


def test_who_reads_slowly_gets_larger_pieces_and_the_same_text(server):
    body = {"model": "tiny", "prompt": "x", "max_tokens": 450, "n": 8, "seed": 1, "logprobs": 20, "ignore_eos": True}
    whole = choices_said([server.ask(COMPLETIONS, body).json()])

    data = json.dumps(body | {"stream": True}).encode()
    address = urlsplit(server.url)
    with socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.settimeout(PATIENCE_S)
        line.connect((address.hostname, address.port))
        head = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        line.sendall(head % (COMPLETIONS.encode(), len(data)) + data)
        wait_until(lambda: server.ask("/stats").json()["running"] == 8)
        wait_until(lambda: server.ask("/stats").json()["running"] == 0)  # the engine has not waited
        response = HTTPResponse(line)
        response.begin()
        *frames, done = events(response.read().decode())
    assert done == "[DONE]"
    streamed = choices_said([json.loads(frame) for frame in frames])

    assert [(said.text, said.tokens) for said in streamed] == [(said.text, said.tokens) for said in whole]
    assert sum(said.num_chunks for said in streamed) < 8 * 450
