"""Task 10.8: places for answers, and what who gets none is told."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from minisgl.message.messages import Gauges
from minisgl.server.config import ServerConfig
from minisgl.server.errors import ApiError
from minisgl.server.service import STOPPING, Service
from tests.ch10_serving.scene import BYTES, run, settled

RUNNING, QUEUE = 3, 2


def new_service(max_queue: int = QUEUE) -> Service:
    service = Service(ServerConfig(max_queue=max_queue), "tiny")
    config = SimpleNamespace(max_running_requests=RUNNING)
    service.open(SimpleNamespace(config=config, dead="", gauges=Gauges(), tokenizer=BYTES))
    return service


def refusal(service, num=1) -> ApiError:
    with pytest.raises(ApiError) as error, service._hold(num):
        pytest.fail("let in")
    return error.value


def test_as_many_are_let_in_as_may_run_and_wait():
    service = new_service()
    with ExitStack() as inside:
        for _ in range(RUNNING + QUEUE):
            inside.enter_context(service._hold(1))
        assert service.num_held == RUNNING + QUEUE
        assert refusal(service).status_code == 429


def test_who_is_refused_is_told_when_to_come_back():
    service = new_service(max_queue=0)
    with service._hold(RUNNING):
        error = refusal(service)
    assert int(error.headers["retry-after"]) >= 1
    assert (error.body["error"]["type"], error.body["error"]["code"]) == ("rate_limit_error", "queue_full")


def test_who_is_refused_takes_no_place():
    service = new_service()
    with service._hold(RUNNING + QUEUE):
        for _ in range(3):
            refusal(service)
        assert service.num_held == RUNNING + QUEUE
    assert service.num_held == 0


def test_every_answer_of_a_request_takes_a_place():
    service = new_service()
    with service._hold(3):
        assert refusal(service, 3).status_code == 429
        with service._hold(2):
            assert service.num_held == 5


def test_a_place_is_free_again_when_the_answer_is_given():
    service = new_service()
    for _ in range(20):
        with service._hold(RUNNING + QUEUE):
            pass
    assert service.num_held == 0


def test_a_place_is_free_again_when_the_request_fails():
    service = new_service()
    for _ in range(20):
        with pytest.raises(ValueError, match="too long"), service._hold(2):
            raise ValueError("too long")
    assert service.num_held == 0


def test_a_place_is_free_again_when_the_client_goes():
    service = new_service()

    async def answer():
        with service._hold(2):
            await asyncio.Event().wait()

    async def main():
        tasks = [asyncio.ensure_future(answer()) for _ in range(2)]
        await settled()
        for task in tasks:
            if task.done():
                task.result()
        assert service.num_held == 4
        for task in tasks:
            task.cancel()
        await settled()

    run(main())
    assert service.num_held == 0


def test_what_can_never_fit_is_the_clients_mistake_and_not_a_matter_of_time():
    service = new_service()
    error = refusal(service, RUNNING + QUEUE + 1)
    told = (error.status_code, error.body["error"]["param"], error.headers)
    assert told == (400, "n", None), "more than all places: no 429 and no retry-after, since it will never fit"
    with service._hold(1):
        assert refusal(service, RUNNING + QUEUE + 1).status_code == 400


def test_without_a_queue_only_those_that_run_are_let_in():
    service = new_service(max_queue=0)
    with service._hold(RUNNING):
        assert refusal(service).status_code == 429


def test_who_comes_when_the_server_stops_or_its_engine_is_gone_is_told_that():
    stopping, dead = new_service(), new_service()
    stopping.closed = STOPPING
    dead._engine.dead = "killed by signal 9"
    assert [refusal(service).status_code for service in (stopping, dead)] == [503, 503]
    assert stopping.num_held == dead.num_held == 0
