"""Task 08.8: steps in flight are taken in, oldest first, until so many are left."""

from __future__ import annotations

import pytest

from minisgl.engine.runner import Flight
from tests.ch08_cuda_graphs.loop import device, new_engine, new_request
from tests.helpers import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model().to(device())


@pytest.fixture
def engine(model):
    return new_engine(model)


def take_off(engine, steps, tokens=lambda number: [50 + number]):
    """Plan so many steps of whoever waits and put them in flight, without a model: step i brings token 50 + i."""
    read = []

    def bring(number):
        read.append(number)
        return tokens(number)

    for number in range(steps):
        engine.flights.append(Flight(engine.scheduler.plan(), lambda number=number: bring(number)))
    return read


def test_nothing_is_taken_in_while_no_more_are_in_flight_than_may_be(engine):
    engine.add(new_request(0, prompt=5))
    read = take_off(engine, steps=1)

    assert engine._retire(1) == [], "one is in flight and one may be: nothing to take in"
    assert (read, len(engine.flights)) == ([], 1)


def test_the_oldest_are_taken_in_first(engine):
    request = new_request(0, prompt=5)
    engine.add(request)
    read = take_off(engine, steps=3)

    engine._retire(0)

    assert (read, request.output) == ([0, 1, 2], [50, 51, 52]), "the oldest is flights[0]"
    assert len(engine.flights) == 0


def test_so_many_stay_in_flight(engine):
    request = new_request(0, prompt=5)
    engine.add(request)
    read = take_off(engine, steps=3)

    engine._retire(1)

    assert (read, request.output, len(engine.flights)) == ([0, 1], [50, 51], 1)


def test_whoever_got_a_token_is_returned_of_all_steps_taken_in(engine):
    a, b = new_request(0, prompt=5, max_tokens=1), new_request(1, prompt=5)
    engine.add(a)
    engine.add(b)
    take_off(engine, steps=2, tokens=lambda number: [50, 60] if number == 0 else [61])

    grown = engine._retire(0)

    ids = [request.id for request in grown]
    assert ids == [a.id, b.id, b.id], "of all steps, in their order: who got two tokens comes twice"
    assert (a.output, b.output) == ([50], [60, 61])


def test_a_token_that_comes_after_the_end_is_dropped(engine):
    request = new_request(0, prompt=5, stop_ids=frozenset({50}))
    engine.add(request)
    take_off(engine, steps=2)

    grown = engine._retire(0)

    assert (request.output, request.finish_reason) == ([50], "stop")
    assert grown == [request], "the step behind it brought nothing"


def test_a_wait_that_is_interrupted_loses_no_step(engine):
    request = new_request(0, prompt=5)
    engine.add(request)
    interrupted = []

    def ctrl_c(number):
        if not interrupted:
            interrupted.append(number)
            raise KeyboardInterrupt
        return [50 + number]

    take_off(engine, steps=2, tokens=ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        engine._retire(0)
    assert len(engine.flights) == 2, "the step was not taken in, and it is in flight no more"

    engine._retire(0)
    assert request.output == [50, 51]


def test_pages_go_back_with_the_last_step_that_uses_them(engine):
    request = new_request(0, prompt=5, max_tokens=9)
    engine.add(request)
    take_off(engine, steps=2)
    held = engine.pages.capacity - engine.pages.num_free
    engine.abort(0)

    engine._retire(1)
    assert engine.pages.capacity - engine.pages.num_free == held

    engine._retire(0)
    assert engine.pages.capacity - engine.pages.num_free == engine.prefix.num_pages
