"""The engine process's loop, with a front that says what the test has written down."""

from __future__ import annotations

import json

import pytest

from minisgl.config import EngineConfig
from minisgl.core import SamplingParams
from minisgl.engine.engine import Engine
from minisgl.engine.serial import SerialEngine
from minisgl.message import messages as m
from minisgl.server.engine_process import Server
from tests.helpers import check_whole, tiny_model

LONG = SamplingParams(max_tokens=6, ignore_eos=True)


class Script:
    """A front whose messages come in rounds: before each step one, and when there are no more, a Stop."""

    def __init__(self, *rounds):
        self.rounds = list(rounds)
        self.sent = []
        self.waits = 0

    def send(self, message):
        self.sent.append(message)

    def wait(self, timeout_ms=None):
        self.waits += 1

    def messages(self):
        return self.rounds.pop(0) if self.rounds else [m.Stop()]

    def of(self, kind):
        return [message for message in self.sent if isinstance(message, kind)]

    def outputs(self, request_id):
        return [output for step in self.of(m.StepDone) for output in step.outputs if output.id == request_id]


def submit(request_id, tokens=(5, 6, 7), params=LONG):
    return m.Submit(request_id, list(tokens), params, seed=request_id, stop_ids=[])


def serve(*rounds, **switches):
    engine = Engine(tiny_model(), EngineConfig(**({"kv_pages": 80} | switches)))
    front = Script(*rounds)
    Server(engine, front).serve()
    return engine, front


STEPS = [[]] * LONG.max_tokens


def test_the_first_message_says_what_the_engine_is():
    _, front = serve(max_model_len=64)

    assert front.sent[0] == m.Ready("cpu", 64, 131, [2, 7], front.sent[0].gauges)
    assert (front.sent[0].gauges.pages, front.sent[0].gauges.pages_available) == (79, 79)


def test_all_that_waits_is_taken_before_the_next_step():
    _, front = serve([submit(0), submit(1)], *STEPS)
    assert [[o.id for o in step.outputs] for step in front.of(m.StepDone)] == [[0, 1]] * LONG.max_tokens


def test_a_request_that_comes_while_others_run_joins_their_next_step():
    _, front = serve([submit(0)], [], [submit(1)], *STEPS)
    assert [[o.id for o in step.outputs] for step in front.of(m.StepDone)][:4] == [[0], [0], [0, 1], [0, 1]]


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_each_step_tells_the_tokens_that_are_new_and_the_last_one_why_it_ended(overlap):
    engine = Engine(tiny_model(), EngineConfig(kv_pages=80))
    engine.add(alone := submit(0).request())
    while engine.has_work:
        engine.step()

    _, front = serve([submit(0)], *STEPS, [], overlap=overlap)
    outputs = front.outputs(0)
    assert [token for output in outputs for token in output.tokens] == alone.output
    assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + ["length"]


def test_logprobs_are_told_once():
    params = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=1)
    _, front = serve([submit(0, params=params)], *STEPS)
    assert [[t.token_id for t in output.logprobs] for output in front.outputs(0)] == [
        output.tokens for output in front.outputs(0)
    ]


@pytest.mark.parametrize("reason", ["abort", "stop"])
def test_an_abort_ends_the_request_in_the_next_step_and_frees_its_pages(reason):
    _, front = serve([submit(0)], [], [m.Abort(0, reason)], [], prefix_cache="none")

    [*_, last] = front.of(m.StepDone)
    assert [(output.id, output.finish_reason) for output in last.outputs] == [(0, reason)]
    assert (last.gauges.running, last.gauges.pages_available) == (0, last.gauges.pages)


def test_an_abort_of_a_request_that_is_over_or_never_was_is_ignored():
    _, front = serve([submit(0)], *STEPS, [m.Abort(0), m.Abort(9)], [submit(1)], *STEPS)
    assert front.outputs(1)[-1].finish_reason == "length"


def test_a_request_that_cannot_be_served_is_an_output_that_says_why():
    _, front = serve([submit(0, tokens=[10**6])], [])
    [output] = front.outputs(0)

    assert (output.finish_reason, output.tokens) == ("error", [])
    assert "outside 0" in output.error


def test_the_loops_of_the_first_chapters_serve_too():
    front = Script([m.decode_to_engine(m.encode(submit(0)))], *STEPS)
    Server(SerialEngine(tiny_model(), EngineConfig(kv_cache="contiguous")), front).serve()

    assert front.outputs(0)[-1].finish_reason == "length"


def test_the_loop_waits_for_messages_when_and_only_when_there_is_no_work():
    _, front = serve([submit(0)], *STEPS[1:], [], [])
    assert front.waits == 1 + 3  # before the first message, and after the last step


def test_gauges_and_stats_tell_of_the_same_engine():
    _, front = serve([submit(0), submit(1)], [m.AskStats(5)], *STEPS)
    [stats], gauges = front.of(m.Stats), front.of(m.StepDone)[0].gauges

    assert (stats.id, stats.values["steps"], stats.values["requests_running"]) == (5, 1, 2)
    assert (gauges.steps, gauges.running, gauges.waiting) == (1, 2, 0)
    assert gauges.pages == stats.values["pages"]


def test_a_watcher_gets_a_header_what_is_there_and_the_step_after_which_nobody_runs():
    _, front = serve([submit(0, range(40))], *STEPS, [m.Watch(7, True)], [submit(1)], *STEPS)
    header, first, *later = [json.loads(event.line) for event in front.of(m.Event) if event.id == 7]

    assert header["pages"] == 79
    assert [node[2] for node in first["tree"]] == [32]  # of the request that ran before
    assert later[-1]["finished"] == [[1, "length"]]
    assert not any(event["tables"].get("1") for event in later[-1:])
    assert later[-1]["free"] == 79 - sum(len(node[3]) for node in later[-1].get("tree", first["tree"]))


def test_who_looks_no_longer_gets_nothing_more():
    _, front = serve([m.Watch(7, True)], [m.Watch(7, False), submit(1)], *STEPS)
    assert len(front.of(m.Event)) == 2  # header, and what was there


def test_a_trace_to_a_file_goes_on_beside_the_watchers(tmp_path):
    path = tmp_path / "trace"
    _, front = serve([m.Watch(7, True), submit(1)], *STEPS, trace=str(path))

    assert len(path.read_text().splitlines()) == 1 + LONG.max_tokens
    assert len(front.of(m.Event)) > 2


def test_stop_aborts_what_is_open_and_gives_the_memory_back():
    engine, front = serve([submit(0)], [submit(1), m.Stop(), submit(2)])

    assert engine.pool.kv.numel() == 0
    assert not engine.has_work
    check_whole(engine.scheduler)
    assert front.outputs(2) == []
