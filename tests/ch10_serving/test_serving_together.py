"""All of the chapter at once: the app, with an engine in a process of its own behind it. It is started once."""

from __future__ import annotations

import asyncio

import pytest

from minisgl.config import EngineConfig
from minisgl.server.app import make_app
from minisgl.server.client import EngineClient
from minisgl.server.config import ServerConfig
from minisgl.server.service import Service
from tests.ch10_serving.scene import BYTES, Connection, events
from tests.helpers import hf_twin, tiny_model

ASK = {"model": "tiny", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
CHAT = ASK | {"messages": [{"role": "user", "content": "Say 👍."}]}
RUNNING = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    hf_twin(tiny_model(vocab_size=300, eos_token_ids=(0,))).save_pretrained(path)
    BYTES.save_pretrained(path)
    return path


def scope(path: str, method: str = "POST") -> dict:
    headers = [(b"content-type", b"application/json")]
    return {"type": "http", "method": method, "path": path, "query_string": b"", "headers": headers} | {
        "http_version": "1.1", "scheme": "http", "server": ("test", 80), "client": ("test", 1), "root_path": ""
    }  # fmt: skip


async def until(holds) -> None:
    while not holds():
        await asyncio.sleep(0.01)


class Front:
    """The app and its engine."""

    def __init__(self, client: EngineClient) -> None:
        self.client, self.service = client, Service(ServerConfig(served_model_name="tiny", max_queue=0), "tiny")
        self.service.open(client)
        self.app = make_app(self.service)

    async def begin(self, path: str, body: dict) -> tuple[asyncio.Task, Connection]:
        connection = Connection(body)
        return asyncio.ensure_future(self.app(scope(path), connection.receive, connection.send)), connection

    async def post(self, path: str, body: dict) -> Connection:
        task, connection = await self.begin(path, body)
        await task
        return connection


async def a_stream_says_what_an_answer_says(front: Front) -> None:
    for stop in ([], ["a"], ["\n", "e"]):
        whole = await front.post("/v1/chat/completions", CHAT | {"stop": stop})
        [answer] = events(b"data: " + whole.body + b"\n\n")
        stream = await front.post("/v1/chat/completions", CHAT | {"stop": stop, "stream": True})
        *chunks, done = events(stream.body)
        said = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert done == "[DONE]"
        assert said == answer["choices"][0]["message"]["content"]
        assert chunks[-1]["choices"][0]["finish_reason"] == answer["choices"][0]["finish_reason"]


async def who_hangs_up_is_aborted_and_the_pages_come_back(front: Front) -> None:
    client, long = front.client, ASK | {"prompt": "for ever", "max_tokens": 400}
    for stream in (True, False):
        task, connection = await front.begin("/v1/completions", long | {"stream": stream})
        await until(lambda: client.gauges.running == 1)
        connection.hang_up()
        await task
        steps = client.gauges.steps
        await until(lambda: client.num_open == 0)
        await until(lambda: client.gauges.running == 0)
        assert client.gauges.pages_available == client.gauges.pages
        assert client.gauges.steps - steps < 100, "the answer was written to its end"
    assert front.service.num_held == 0
    assert dict(front.service.metrics.aborted) == {"client_gone": 2}


async def who_finds_it_full_is_sent_away_and_let_in_later(front: Front) -> None:
    long = ASK | {"prompt": "x", "max_tokens": 400}
    begun = [await front.begin("/v1/completions", long) for _ in range(RUNNING)]
    await until(lambda: front.service.num_held == RUNNING)
    assert (await front.post("/v1/completions", long)).status == 429
    begun[0][1].hang_up()
    await begun[0][0]
    assert (await front.post("/v1/completions", long | {"max_tokens": 2})).status == 200
    for task, connection in begun[1:]:
        connection.hang_up()
        await task


def test_streams_aborts_and_refusals_of_a_real_engine(folder):
    async def main():
        config = EngineConfig(model=str(folder), device="cpu", max_running_requests=RUNNING, kv_pages=200)
        client = await EngineClient.start(config)
        try:
            front = Front(client)
            for part in (
                a_stream_says_what_an_answer_says,
                who_hangs_up_is_aborted_and_the_pages_come_back,
                who_finds_it_full_is_sent_away_and_let_in_later,
            ):
                await asyncio.wait_for(part(front), 60)
        finally:
            await client.close()

    asyncio.run(main())
