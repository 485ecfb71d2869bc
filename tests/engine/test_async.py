"""Streams under asyncio: many at once, steps that never overlap, and cancellation that leaves nothing behind."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from minisgl import LLM, EngineConfig, SamplingParams
from tests.helpers import check_whole

LONG = SamplingParams(max_tokens=60, ignore_eos=True)
PROMPTS = ["one", "two and more", "👍", "one"]


@pytest.fixture
def llm(tiny_folder):
    with LLM(EngineConfig(model=str(tiny_folder), device="cpu", kv_pages=60)) as llm:
        yield llm


@pytest.fixture
def overlaps(llm, monkeypatch):
    """Notes every step that begins before another has ended; steps are made slow enough to meet."""
    running, seen, launch = threading.Lock(), [], llm.engine.launch

    def slow_launch(batch):
        if not running.acquire(blocking=False):
            seen.append(batch)
            return launch(batch)
        flight = launch(batch)
        time.sleep(0.002)
        running.release()
        return flight

    monkeypatch.setattr(llm.engine, "launch", slow_launch)
    return seen


async def collect(llm, prompt, params=LONG):
    pieces = [(piece, completion) async for piece, completion in llm.astream(prompt, params)]
    return "".join(piece for piece, _ in pieces), pieces[-1][1]


async def begun(llm, prompt):
    """A task that reads a stream, once its first piece is there."""
    first = asyncio.Event()

    async def read():
        async for _ in llm.astream(prompt, LONG):
            first.set()

    task = asyncio.create_task(read())
    await first.wait()
    return task


def idle(llm):
    """Let aborted requests leave; then nothing may be held."""
    while llm.engine.has_work:
        llm.step()
    assert llm._open == {}
    check_whole(llm.engine.scheduler)


def test_streams_side_by_side_get_what_they_get_alone(llm, overlaps):
    alone = [(c.text, c.token_ids) for c in llm.generate(PROMPTS, LONG)]

    async def together():
        return await asyncio.gather(*(collect(llm, prompt) for prompt in PROMPTS))

    answers = asyncio.run(together())
    assert [(text, completion.token_ids) for text, completion in answers] == alone
    assert [completion.text for _, completion in answers] == [text for text, _ in answers]
    assert overlaps == []


def test_streams_share_steps(llm):
    async def together():
        await asyncio.gather(*(collect(llm, prompt) for prompt in PROMPTS))

    asyncio.run(together())
    assert llm.work.steps < 2 * LONG.max_tokens  # and not four times as many


def test_a_cancelled_stream_aborts_its_request_and_not_the_others(llm, overlaps):
    async def scenario():
        other = asyncio.create_task(collect(llm, "two"))
        task = await begun(llm, "one")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await other

    _, completion = asyncio.run(scenario())
    assert (completion.finish_reason, len(completion.token_ids)) == ("length", LONG.max_tokens)
    assert llm.work.tokens_computed < 2 * LONG.max_tokens
    assert overlaps == []
    idle(llm)


def test_a_stream_that_is_cancelled_twice_still_waits_for_its_step(llm, overlaps, monkeypatch):
    begun, go, launch = threading.Event(), threading.Event(), llm.engine.launch
    inside, most = [], []

    def held_launch(batch):
        inside.append(batch)
        most.append(len(inside))
        begun.set()
        go.wait()
        inside.remove(batch)
        return launch(batch)

    async def scenario():
        task = asyncio.create_task(collect(llm, "one"))
        await asyncio.to_thread(begun.wait)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        other = asyncio.create_task(collect(llm, "two"))
        await asyncio.sleep(0.05)  # time enough to begin a step beside the one that runs
        go.set()
        await asyncio.wait([task])
        return await other

    monkeypatch.setattr(llm.engine, "launch", held_launch)
    _, completion = asyncio.run(scenario())
    assert completion.finish_reason == "length"
    assert (max(most), overlaps) == (1, [])
    idle(llm)


def test_a_stream_that_is_closed_early_aborts_its_request(llm):
    async def scenario():
        stream = llm.astream("one", LONG)
        await anext(stream)
        await stream.aclose()

    asyncio.run(scenario())
    assert llm._open == {}
    idle(llm)


def test_a_timeout_ends_a_stream(llm, overlaps):
    async def scenario():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(collect(llm, "one"), 0.01)

    asyncio.run(scenario())
    idle(llm)


def test_abort_while_a_step_runs_ends_the_stream_with_abort(llm, overlaps):
    async def scenario():
        seen = []
        async for _, completion in llm.astream("one", LONG):
            seen.append(completion)
            llm.abort(completion.request_id)
        return seen[-1]

    completion = asyncio.run(scenario())
    assert completion.finish_reason == "abort"
    assert len(completion.token_ids) < LONG.max_tokens
    idle(llm)


def test_an_abort_waits_for_the_step_that_runs(llm, monkeypatch):
    launch, seen = llm.engine.launch, []

    def abort_inside(batch):
        llm.abort(batch.requests[0].id)  # as from the event loop, while this runs in its thread
        seen.append(batch.requests[0].finish_reason)
        return launch(batch)

    monkeypatch.setattr(llm.engine, "launch", abort_inside)
    _, completion = asyncio.run(collect(llm, "one"))
    assert (seen, completion.finish_reason) == ([None], "abort")


def test_the_event_loop_is_free_while_a_step_runs(llm, overlaps):
    async def scenario():
        turns, done = 0, asyncio.create_task(collect(llm, "one"))
        while not done.done():
            turns += 1
            await asyncio.sleep(0)
        return turns

    assert asyncio.run(scenario()) > 2 * LONG.max_tokens


def test_one_llm_serves_one_event_loop_after_another(llm):
    async def together():
        return await asyncio.gather(*(collect(llm, prompt) for prompt in PROMPTS))

    assert [text for text, _ in asyncio.run(together())] == [text for text, _ in asyncio.run(together())]


def test_a_prompt_that_cannot_be_served_is_a_completion_with_an_error(llm):
    text, completion = asyncio.run(collect(llm, []))

    assert (text, completion.finish_reason) == ("", "error")
    assert "empty" in completion.error


def test_a_step_that_fails_reaches_whoever_runs_it(llm, monkeypatch):
    def out_of_memory(batch):
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "launch", out_of_memory)
        with pytest.raises(MemoryError):
            asyncio.run(collect(llm, "one"))
    assert asyncio.run(collect(llm, "one"))[1].finish_reason == "length"
    idle(llm)
