"""Task 10.9: the loop of the engine's process."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import pairwise

import pytest

from minisgl.core import SamplingParams
from minisgl.distributed.ranks import RankDied
from minisgl.message import messages as m
from tests.ch10_serving.engine import LONG, asks, new_server


def serve(*batches, **config):
    """Serve these messages, then Stop; returns the server."""
    server = new_server(*batches, **config)
    server.serve()
    return server


def steps(server):
    return [message for message in server.front.sent if isinstance(message, m.StepDone)]


def outputs(server, request_id):
    return [output for done in steps(server) for output in done.outputs if output.id == request_id]


def test_the_first_word_is_what_the_front_must_know():
    server = serve()
    ready = server.front.sent[0]
    assert isinstance(ready, m.Ready)
    assert (ready.device, ready.max_len) == ("cpu", server.engine.scheduler.max_len)
    assert (ready.vocab_size, ready.eos_token_ids) == (131, [2, 7])
    assert ready.gauges.pages == server.engine.pages.capacity


def test_a_request_is_answered():
    server = serve([asks(3, [5, 6, 7])])
    assert sum(len(output.tokens) for output in outputs(server, 3)) == LONG.max_tokens
    assert outputs(server, 3)[-1].finish_reason == "length"


def test_all_that_wait_are_in_the_next_step():
    server = serve([asks(i, [5, 6, 7 + i]) for i in range(5)])
    assert sorted(output.id for output in steps(server)[0].outputs) == [0, 1, 2, 3, 4]
    assert len(steps(server)) == LONG.max_tokens


def test_there_is_a_look_at_the_messages_before_every_step():
    server = serve([asks(0, [5, 6])], [], [asks(1, [5, 8])])
    log = [entry for entry in server.front.log if entry in ("look", "StepDone")]
    pairs = pairwise(log)
    assert all(before == "look" for before, entry in pairs if entry == "StepDone")
    first = next(i for i, done in enumerate(steps(server)) if any(output.id == 1 for output in done.outputs))
    assert first == 2, "who came before the third step was not in it"


def test_an_abort_takes_effect_before_the_next_step():
    server = serve([asks(0, [5, 6]), asks(1, [5, 7])], [m.Abort(0)])
    assert [output.finish_reason for output in outputs(server, 0)] == [None, "abort"]
    assert outputs(server, 1)[-1].finish_reason == "length"


def test_who_is_aborted_in_the_same_breath_is_told_so_without_a_token():
    server = serve([asks(0, [5, 6]), m.Abort(0)])
    [output] = outputs(server, 0)
    assert (output.finish_reason, output.tokens) == ("abort", [])


def test_questions_about_the_engine_are_answered_while_it_works_and_while_it_rests():
    server = serve([asks(0, [5, 6])], [m.AskStats(7)], *[[]] * 20, [m.AskStats(8)])
    stats = {message.id: message.values for message in server.front.sent if isinstance(message, m.Stats)}
    assert stats[7]["requests_running"] == 1
    assert stats[8]["requests_running"] == 0


def test_stop_ends_the_loop_and_what_is_open_and_leaves_no_page_held():
    server = serve([asks(0, [5, 6], SamplingParams(max_tokens=100, ignore_eos=True))], [], [m.Stop()])
    assert len(steps(server)) == 2
    assert not server.engine.has_work
    assert server.engine.scheduler.cache.num_available == server.engine.pages.capacity


def test_nobody_is_stepped_for_when_nobody_asks():
    server = serve([], [], [])
    assert steps(server) == []


@pytest.mark.parametrize("busy", [True, False], ids=["in a step", "at rest"])
def test_another_ranks_death_ends_the_loop_in_a_step_and_at_rest(busy):
    server = new_server([asks(0, [5, 6])] if busy else [], [], [])
    looks = []

    @contextmanager
    def guard():
        looks.append(len(looks))
        if len(looks) == 2:
            raise RankDied("rank 1 was killed by signal 9 (SIGKILL)")
        yield

    server.engine.guard = guard
    with pytest.raises(RankDied):
        server.serve()


def test_a_death_in_the_middle_of_a_step_is_seen_by_the_guard():
    server = new_server([asks(0, [5, 6])])
    inside, step = [], server.engine.step

    @contextmanager
    def guard():
        inside.append(1)
        yield
        inside.pop()

    def watched_step():
        assert inside, "a step waits for the other ranks outside of the guard"
        return step()

    server.engine.guard, server.engine.step = guard, watched_step
    server.serve()
    assert outputs(server, 0)[-1].finish_reason == "length"
