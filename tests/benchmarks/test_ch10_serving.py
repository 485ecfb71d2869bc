"""What chapter 10's figures are drawn from: the recordings hang together."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks import ch10_serving
from benchmarks.record import load
from benchmarks.serving.own import free_port


@pytest.fixture(scope="module")
def data():
    return load("ch10_serving")["data"]


@pytest.fixture(scope="module")
def events(data):
    return data["abort"]["events"]


def place(events, who, what, **more):
    """The index of the only event of that kind."""
    [found] = [
        i
        for i, event in enumerate(events)
        if (event["who"], event["what"]) == (who, what) and event.items() >= more.items()
    ]
    return found


def test_a_port_where_nobody_listens_serves_nothing():
    assert not ch10_serving.serving(("127.0.0.1", free_port()))


def test_the_recorded_stream_is_whole(data):
    wire = "".join(packet["bytes"] for packet in data["stream"]["packets"])
    *chunks, done = re.findall(r"^data: (.*)\n\n", wire.replace("\r\n", "\n"), re.MULTILINE)
    bodies = [json.loads(chunk) for chunk in chunks]
    choices = [choice for body in bodies for choice in body["choices"]]

    assert done == "[DONE]"
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "The capital of France is Paris."
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    assert [bool(body["choices"]) for body in bodies][-1:] == [False]


def test_the_recorded_abort_goes_from_the_client_through_the_front_to_the_engine(events):
    gone = next(event["id"] for event in events if event["what"] == "Abort")
    way = [
        place(events, "client", "hangs up"),
        place(events, "front", "http.disconnect"),
        place(events, "front", "Abort", id=gone),
        place(events, "engine", "Abort", id=gone),
    ]
    assert way == sorted(way)


def test_the_recorded_abort_met_a_step_whose_token_came_for_nobody(events):
    gone = next(event["id"] for event in events if event["what"] == "Abort")
    sent, taken = place(events, "front", "Abort"), place(events, "engine", "Abort")
    told = [
        event["outputs"] for event in events[sent:taken] if event["who"] == "engine" and event["what"] == "StepDone"
    ]
    assert [gone, None] in [output for outputs in told for output in outputs]


def test_the_recorded_aborts_pages_are_back_in_the_next_step(events):
    taken = place(events, "engine", "Abort")
    told = [event for event in events if event["who"] == "engine" and event["what"] == "StepDone"]
    before = [event for event in told if event["ms"] < events[taken]["ms"]][-1]
    after = next(event for event in told if event["ms"] > events[taken]["ms"])
    assert after["pages_available"] > before["pages_available"]


def test_every_point_of_the_recorded_curve_has_all_its_requests(data):
    for point in data["curve"]["points"].values():
        assert (point["completed"], point["errors"]) == (point["requests"], {})
