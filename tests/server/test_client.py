"""The engine in its own process, seen from an asyncio program: the answers of `LLM`, and an end to everything."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import aclosing
from multiprocessing import active_children
from pathlib import Path

import minisgl_hub as hub
import pytest

from minisgl import LLM, EngineConfig, SamplingParams
from minisgl.message import messages as m
from minisgl.server.client import EngineClient, EngineDied
from minisgl.tokenizer.answer import Answer
from tests.distributed.group import eventually, gone
from tests.engine import conftest as models

ROOT = Path(__file__).parents[2]
GREEDY = SamplingParams(max_tokens=12)
LONG = SamplingParams(max_tokens=60, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=120, ignore_eos=True, detokenize=False)
CHAT = [{"role": "user", "content": "hi 👍"}]

tiny_folder = models.tiny_folder


def config_of(folder, **switches):
    return EngineConfig(**({"model": str(folder), "device": "cpu", "kv_pages": 80} | switches))


@pytest.fixture(scope="module")
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def client(loop, tiny_folder):
    """One for the tests that leave it as it was."""
    client = loop.run_until_complete(EngineClient.start(config_of(tiny_folder)))
    yield client
    loop.run_until_complete(client.close())


@pytest.fixture
def start(tiny_folder):
    """Starts clients of a test's own loop, which may be ended in any way."""

    async def start(**switches):
        return await EngineClient.start(config_of(tiny_folder, **switches))

    others = engines()
    yield start
    gc.collect()
    assert eventually(lambda: engines() == others)


@pytest.fixture
def no_folder_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def llm(tiny_folder):
    return LLM(config_of(tiny_folder))


def engines():
    """The ids of this process's engine processes, the newest last."""
    return sorted(child.pid for child in active_children() if child.name == "the engine")


def told(completion):
    return completion.text, completion.token_ids, completion.finish_reason, completion.logprobs, completion.index


async def idle(client):
    """Until the engine's last step has been told."""
    while client.num_open or client.gauges.running or client.gauges.waiting:
        await asyncio.sleep(0.005)


# Answers

PARAMS = {
    "greedy": GREEDY,
    "long": LONG,
    "n and a seed": SamplingParams(max_tokens=9, temperature=1.0, n=3, seed=5),
    "logprobs": SamplingParams(max_tokens=6, logprobs=2),
    "penalties": SamplingParams(max_tokens=9, repetition_penalty=1.5, frequency_penalty=0.5, logit_bias={72: 2.0}),
    "a stop token": SamplingParams(stop_token_ids=[72], logit_bias={72: 100.0}, ignore_eos=True),
    "a stop string": SamplingParams(max_tokens=20, stop="eee", logit_bias={72: 100.0}, ignore_eos=True),
    "min_tokens": SamplingParams(max_tokens=9, min_tokens=4, logit_bias={0: 100.0}),
    "no text": SamplingParams(max_tokens=9, detokenize=False),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_answers_are_those_of_llm(loop, client, llm, params, stream):
    prompts = ["Hello", CHAT, [5, 6, 7]]

    async def ask():
        asked = [client.submit(await client.encode(prompt), params, stream) for prompt in prompts]
        return [await answer.finished() for answers in asked for answer in answers]

    assert list(map(told, loop.run_until_complete(ask()))) == list(map(told, llm.generate(prompts, params)))


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_pieces_join_to_the_completion_and_the_last_one_comes_with_the_reason(loop, client, params):
    async def ask():
        [answer, *_] = client.submit([5, 6, 7], params, stream=True)
        return answer, [(piece, answer.completion.finish_reason) async for piece in answer]

    answer, pieces = loop.run_until_complete(ask())
    assert "".join(piece.text for piece, _ in pieces) == answer.completion.text
    assert [i for piece, _ in pieces for i in piece.token_ids] == answer.completion.token_ids
    assert [t for piece, _ in pieces for t in piece.logprobs] == answer.completion.logprobs
    assert [reason for _, reason in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1][1] is not None


def test_what_a_slow_reader_missed_comes_in_one_piece(loop, client, llm):
    async def ask():
        [answer] = client.submit([5, 6, 7], LONG, stream=True)
        await idle(client)
        return answer, [piece async for piece in answer]

    answer, [piece] = loop.run_until_complete(ask())
    [expected] = llm.generate([[5, 6, 7]], LONG)
    assert (piece.text, piece.token_ids) == (expected.text, expected.token_ids)
    assert 0 < answer.completion.first_token_s < answer.completion.total_s  # when they came, not when they were read


def test_a_slow_reader_finds_the_stop_string_where_a_quick_one_does(loop, client, llm):
    params = PARAMS["a stop string"]

    async def ask():
        [answer] = client.submit([5, 6, 7], params, stream=True)
        await idle(client)  # the engine goes on to its end: nobody has read what came
        return await answer.finished()

    assert told(loop.run_until_complete(ask())) == told(*llm.generate([[5, 6, 7]], params))


def test_a_stop_string_ends_the_request_in_the_engine(loop, client):
    params = SamplingParams(max_tokens=120, stop="ee", logit_bias={72: 100.0}, ignore_eos=True)

    async def ask():
        before = client.gauges.steps
        await client.submit([5], params)[0].finished()
        assert client.num_open == 0
        await idle(client)
        return client.gauges.steps - before

    assert loop.run_until_complete(ask()) < 60


def test_an_answer_that_nobody_reads_before_its_end_is_decoded_once(loop, client, monkeypatch):
    read, calls = Answer.read, []
    monkeypatch.setattr(Answer, "read", lambda answer: (calls.append(answer), read(answer)))
    loop.run_until_complete(client.submit([5, 6], LONG)[0].finished())

    assert len(calls) == 1


def test_cached_tokens_are_told(loop, client):
    async def ask():
        prompt = [9] * 40
        return [(await client.submit(prompt, GREEDY)[0].finished()).cached_tokens for _ in range(2)]

    assert loop.run_until_complete(ask()) == [0, 32]


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "prompt is empty"),
        ([5] * 129, GREEDY, "129 tokens, but a sequence may have at most 128"),
        ([10**6], GREEDY, "outside 0"),
        ([10**30], GREEDY, "cannot be sent"),
        ([5], SamplingParams(logit_bias={10**30: 1.0}), "cannot be sent"),
        ([5], SamplingParams(cache_salt="\ud800"), "cannot be sent"),
    ],
)
def test_what_cannot_be_served_is_a_completion_that_says_why(loop, client, prompt, params, message):
    async def ask():
        bad, good = client.submit(prompt, params)[0], client.submit([5], GREEDY)[0]
        return await bad.finished(), await good.finished()

    bad, good = loop.run_until_complete(ask())
    assert (bad.finish_reason, bad.token_ids) == ("error", [])
    assert message in bad.error
    assert good.finish_reason in ("stop", "length")


# Prompts


def test_a_long_text_is_encoded_beside_the_loop_to_the_same_ids(loop, client, llm):
    text = "word 👍 " * 20_000

    async def encode():
        work, turns = asyncio.ensure_future(client.encode(text)), 0
        while not work.done():
            await asyncio.sleep(0)
            turns += 1
        return work.result(), turns

    ids, turns = loop.run_until_complete(encode())
    assert ids == llm.encode(text)
    assert turns > 10


@pytest.mark.parametrize("prompt", ["hi 👍", CHAT, [5, 6], [], [{"role": "user", "content": "hi " * 5000}]])
def test_prompts_are_encoded_as_llm_does(loop, client, llm, prompt):
    assert loop.run_until_complete(client.encode(prompt)) == llm.encode(prompt)


def test_a_chat_for_a_model_without_chat_template_is_refused(loop, client, monkeypatch):
    monkeypatch.setattr(client.tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="no chat template"):
        loop.run_until_complete(client.encode(CHAT))


# Aborts, and what is told beside answers


@pytest.mark.parametrize("stream", [False, True])
def test_an_abort_ends_an_answer_with_what_it_has(loop, client, stream):
    async def ask():
        [answer, other] = client.submit([5, 6], SamplingParams(max_tokens=120, ignore_eos=True, n=2), stream)
        while not answer.completion.token_ids:
            await asyncio.sleep(0.001)
        client.abort(answer)
        completion = await answer.finished()
        client.abort(answer)
        return completion, await other.finished()

    completion, other = loop.run_until_complete(ask())
    assert completion.finish_reason == "abort"
    assert 0 < len(completion.token_ids) < 120
    assert completion.text == client.tokenizer.decode(completion.token_ids)
    assert other.finish_reason == "length"


def test_after_an_abort_no_page_is_held(loop, client):
    async def ask():
        answers = [client.submit([i] * 20, ENDLESS)[0] for i in range(3)]
        await asyncio.sleep(0.05)
        for answer in answers:
            client.abort(answer)
        await idle(client)

    loop.run_until_complete(ask())
    assert client.num_open == 0
    assert client.gauges.pages_available == client.gauges.pages == 79


def test_stats_are_the_engines(loop, client):
    async def ask():
        await idle(client)
        return await asyncio.gather(client.stats(), client.stats())

    stats, again = loop.run_until_complete(ask())
    assert (stats["steps"], stats["requests_running"]) == (client.gauges.steps, 0)
    assert again == stats


def test_stats_that_nobody_waits_for_any_more_disturb_nobody(loop, client):
    async def ask():
        for _ in range(5):
            asked = asyncio.ensure_future(client.stats())
            await asyncio.sleep(0)
            asyncio.get_running_loop().call_soon(asked.cancel)
            await asyncio.wait([asked])
        return await client.stats()

    assert loop.run_until_complete(ask())["pages"] == 79
    assert client.dead == ""


def test_each_watcher_gets_a_trace_from_its_header_on(loop, client):
    async def watch(events):
        async with aclosing(client.watch()) as lines:
            async for line in lines:
                events.append(json.loads(line))
                if events[-1].get("finished"):
                    return

    async def ask():
        one, two = [], []
        first = asyncio.ensure_future(watch(one))
        await asyncio.sleep(0.05)
        second = asyncio.ensure_future(watch(two))
        await asyncio.sleep(0.05)
        await client.submit([5, 6], GREEDY)[0].finished()
        await asyncio.gather(first, second)
        return one, two

    for header, snapshot, *later in loop.run_until_complete(ask()):
        assert (header["pages"], snapshot["step"]) == (79, 0)
        assert later[-1]["finished"][0][1] in ("stop", "length")
    assert client._watchers == {}


# Ends


async def open_answers(client):
    """A stream, a completion that is awaited, stats and a watcher, all open in an engine that has begun."""
    [answer] = client.submit([5] * 20, ENDLESS, stream=True)
    await anext(answer)

    async def events():
        async for _ in client.watch():
            pass

    [other] = client.submit([6], LONG)
    return [asyncio.ensure_future(work) for work in (answer.finished(), other.finished(), events())]


@pytest.mark.usefixtures("no_folder_stays")
def test_the_death_of_the_engine_ends_everything_that_waits_for_it(start):
    async def scenario():
        client = await start()
        waiting = await open_answers(client)
        os.kill(engines()[-1], signal.SIGKILL)
        stats = asyncio.ensure_future(client.stats())
        *answers, events = await asyncio.wait_for(asyncio.gather(*waiting, stats, return_exceptions=True), 60)
        with pytest.raises(EngineDied, match="SIGKILL"):
            client.submit([5], GREEDY)
        with pytest.raises(EngineDied, match="SIGKILL"):
            await client.stats()
        await client.close()
        await client.close()
        return client, answers, events

    client, (stream, awaited, events), stats = asyncio.run(scenario())
    assert client.dead == "the engine was killed by signal 9 (SIGKILL) while running"
    assert [str(end) for end in (stream, awaited, stats)] == [client.dead] * 3
    assert (type(stream), events) == (EngineDied, None)
    assert client.num_open == 0


def test_an_error_in_the_engine_process_is_told_with_its_traceback(start):
    async def scenario():
        client = await start()
        client._send(b"\xc1")  # what it cannot read
        with pytest.raises(EngineDied) as death:
            await client.stats()
        await client.close()
        return str(death.value)

    death = asyncio.run(scenario())
    assert death.startswith("the engine failed:\nTraceback")
    assert "DecodeError" in death


def test_a_message_that_the_front_cannot_read_ends_what_waits(start, monkeypatch):
    async def scenario():
        client = await start()
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        monkeypatch.setattr(m, "decode_from_engine", lambda _: 1 / 0)
        with pytest.raises(EngineDied, match="ZeroDivisionError"):
            await client.submit([5], GREEDY)[0].finished()
        await client.close()

    asyncio.run(scenario())


def test_signals_that_reach_all_processes_leave_the_decision_to_the_front(start):
    async def scenario():
        client = await start()
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(engines()[-1], number)
        completion = await client.submit([5], LONG)[0].finished()
        await client.close()
        return completion

    assert asyncio.run(scenario()).finish_reason == "length"


@pytest.mark.parametrize(("grace_s", "reason"), [(60, "length"), (0, "abort")])
@pytest.mark.usefixtures("no_folder_stays")
def test_close_lets_answers_end_in_the_grace_time_and_aborts_the_others(start, grace_s, reason):
    async def scenario():
        client = await start()
        pid = engines()[-1]
        answers = [client.submit([i] * 20, ENDLESS)[0] for i in range(4)]
        await asyncio.sleep(0)
        await client.close(grace_s)
        assert gone(pid)
        with pytest.raises(EngineDied, match="the engine was closed"):
            client.submit([5], GREEDY)
        return [await answer.finished() for answer in answers]

    assert {completion.finish_reason for completion in asyncio.run(scenario())} == {reason}


@pytest.mark.parametrize(
    ("switches", "error"),
    [
        ({"model": "no-such-model"}, hub.FetchError),
        ({"device": "cuda:99"}, ValueError),
        ({"max_model_len": 500}, ValueError),
    ],
)
@pytest.mark.usefixtures("no_folder_stays")
def test_what_makes_llm_fail_fails_here_with_the_same_words(start, tiny_folder, switches, error):
    with pytest.raises(error) as expected:
        LLM(config_of(tiny_folder, **switches))
    with pytest.raises(error) as raised:
        asyncio.run(start(**switches))

    assert str(raised.value) == str(expected.value)


@pytest.mark.usefixtures("no_folder_stays", "start")
def test_an_engine_that_is_late_is_ended_and_its_stage_named(tiny_folder):
    with pytest.raises(TimeoutError, match=r"not ready within 0\.2 s: it was (looking|starting|importing|loading)"):
        asyncio.run(EngineClient.start(config_of(tiny_folder), timeout_s=0.2))


@pytest.mark.usefixtures("no_folder_stays")
def test_a_start_that_is_cancelled_leaves_nothing(start, tiny_folder):
    async def scenario():
        stages = []
        task = asyncio.ensure_future(EngineClient.start(config_of(tiny_folder), stages.append))
        while "importing torch" not in stages:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return stages

    assert asyncio.run(scenario())[:3] == ["looking for the model", "starting the engine's process", "importing torch"]


FRONT = """
import asyncio, sys
from multiprocessing import active_children
from minisgl import EngineConfig, SamplingParams
from minisgl.server.client import EngineClient

async def main():
    client = await EngineClient.start(EngineConfig(model=sys.argv[1], device="cpu", kv_pages=80))
    client.submit([5], SamplingParams(max_tokens=100, ignore_eos=True))
    print(active_children()[0].pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_a_front_that_is_killed_leaves_neither_process_nor_folder(tiny_folder, tmp_path):
    env = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(
        [sys.executable, "-c", FRONT, str(tiny_folder)], stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT
    ) as front:
        engine = int(front.stdout.readline())
        front.kill()

    assert eventually(lambda: gone(engine))
    assert list(tmp_path.glob("minisgl-*")) == []


# Other engines


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="finds the engine's own children in /proc")
def test_an_engine_over_two_ranks_answers_and_dies_with_each_of_them(start, llm):
    async def scenario():
        client = await start(tp=2)
        answers = [await answer.finished() for answer in client.submit([5, 6, 7], GREEDY)]
        children = Path(f"/proc/{engines()[-1]}/task/{engines()[-1]}/children")
        follower = int(children.read_text().split()[-1])
        os.kill(follower, signal.SIGKILL)  # nobody asks for anything
        while not client.dead:
            await asyncio.sleep(0.02)
        await client.close()
        return answers, client.dead

    answers, death = asyncio.run(scenario())
    assert list(map(told, answers)) == list(map(told, llm.generate([[5, 6, 7]], GREEDY)))
    assert "rank 1 was killed by signal 9" in death


def test_random_weights_without_a_tokenizer_serve_token_ids(start, tiny_folder, tmp_path):
    (tmp_path / "config.json").write_text((tiny_folder / "config.json").read_text())

    async def scenario():
        client = await start(model=str(tmp_path), random_weights=True)
        [answer] = client.submit([5, 6], SamplingParams(max_tokens=9, ignore_eos=True), stream=True)
        pieces = [piece async for piece in answer]
        with pytest.raises(ValueError, match="no tokenizer here: give it token ids"):
            await client.encode("text")
        await client.close()
        return pieces, answer.completion

    pieces, completion = asyncio.run(scenario())
    assert (completion.text, len(completion.token_ids), completion.finish_reason) == ("", 9, "length")
    assert len(pieces) > 1
