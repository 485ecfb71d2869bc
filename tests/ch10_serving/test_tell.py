"""Task 10.7: what a step brought, in one message; and who is forgotten."""

from __future__ import annotations

import pytest

from minisgl.core import SamplingParams
from minisgl.message import messages as m
from tests.ch10_serving.engine import LONG, new_server, submit


def step(server) -> m.StepDone:
    """One step, and the one message about it."""
    told = len(server.front.sent)
    server._tell(server.engine.step())
    [message] = server.front.sent[told:]
    assert isinstance(message, m.StepDone)
    return m.decode_from_engine(m.encode(message))


def finish(server) -> list[m.StepDone]:
    steps = []
    while server.engine.has_work:
        steps.append(step(server))
    return steps


def told(steps, request_id):
    return [output for done in steps for output in done.outputs if output.id == request_id]


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_every_token_is_told_once_and_in_order(overlap):
    server = new_server(overlap=overlap)
    requests = [submit(server, i, [5 + i, 6, 7], LONG) for i in range(3)]
    steps = finish(server)
    for request in requests:
        tokens = [token for output in told(steps, request.id) for token in output.tokens]
        assert tokens == request.output, "each token once, in order: m.news tells those behind the first `known`"
        assert len(tokens) == LONG.max_tokens


def test_a_step_is_one_message_whatever_the_number_of_answers():
    server = new_server()
    for i in range(3):
        submit(server, i, [5, 6, 7 + i], LONG)
    step(server)
    assert sorted(output.id for output in step(server).outputs) == [0, 1, 2]


def test_the_finish_reason_comes_with_the_last_tokens():
    server = new_server()
    submit(server, 4, [5, 6], LONG)
    *before, last = told(finish(server), 4)
    assert {output.finish_reason for output in before} == {None}
    assert (last.finish_reason, len(last.tokens)) == ("length", 1)


def test_who_has_ended_is_forgotten():
    server = new_server()
    for i in range(4):
        submit(server, i, [5, 6, i + 7], SamplingParams(max_tokens=i + 1, ignore_eos=True))
    finish(server)
    assert server._known == {}, "all four have ended: who has a finish_reason is forgotten, or the map grows for ever"


def test_who_was_aborted_is_told_and_forgotten():
    server = new_server()
    submit(server, 0, [5, 6], LONG)
    step(server)
    server._take(m.Abort(0))
    [output] = told(finish(server), 0)
    assert output.finish_reason == "abort"
    assert server._known == {}


def test_an_abort_that_comes_too_late_changes_nothing():
    server = new_server()
    submit(server, 0, [5, 6], SamplingParams(max_tokens=1))
    finish(server)
    server._take(m.Abort(0))
    submit(server, 1, [5, 7], LONG)
    assert told(finish(server), 0) == []
    assert server._known == {}


def test_a_request_that_is_refused_is_told_why_and_forgotten():
    server = new_server()
    submit(server, 0, [], LONG)
    [output] = told(finish(server), 0)
    assert (output.finish_reason, output.tokens) == ("error", [])
    assert output.error
    assert server._known == {}


def test_logprobs_come_with_their_tokens():
    server = new_server()
    request = submit(server, 0, [5, 6], SamplingParams(max_tokens=5, ignore_eos=True, logprobs=2))
    outputs = told(finish(server), 0)
    assert all(len(output.logprobs) == len(output.tokens) for output in outputs)
    assert [entry.token_id for output in outputs for entry in output.logprobs] == request.output


def test_the_gauges_are_those_behind_the_step():
    server = new_server()
    submit(server, 0, [5, 6], LONG)
    first, *_, last = finish(server)
    assert (first.gauges.running, first.gauges.steps) == (1, 1)
    assert (last.gauges.running, last.gauges.waiting) == (0, 0)
    assert last.gauges.pages_available == last.gauges.pages == server.engine.pages.capacity


def test_a_step_that_brought_nobody_a_token_tells_the_gauges_all_the_same():
    server = new_server(max_batch_tokens=4)
    submit(server, 0, [5] * 9, LONG)
    done = step(server)
    assert (done.outputs, done.gauges.tokens_computed) == ([], 4)
