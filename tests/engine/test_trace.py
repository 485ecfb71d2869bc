"""The trace tells, step by step, what the scheduler and the pool did."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from minisgl.config import EngineConfig
from minisgl.engine.engine import Engine
from minisgl.engine.trace import Trace
from tests.helpers import request, serve, tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def traced(model, path, *requests, **switches):
    engine = Engine(model, EngineConfig(trace=str(path), **switches))
    serve(engine, *requests)
    engine.close()
    header, *events = (json.loads(line) for line in path.read_text().splitlines())
    return header, events


def test_the_header_names_the_pool_and_the_switches(model, tmp_path):
    path = tmp_path / "t"
    header, _ = traced(model, path, kv_pages=9, page_size=4)

    chosen = EngineConfig(trace=str(path), kv_pages=9, page_size=4, overlap="off")  # auto on a CPU
    assert header == {"pages": 8} | asdict(chosen)


def test_every_step_is_one_event_with_its_batch(model, tmp_path):
    asked = [request(0, [1] * 3, max_tokens=2), request(1, [2] * 7, max_tokens=1)]
    _, events = traced(model, tmp_path / "t", *asked, kv_pages=20, max_batch_tokens=6)

    assert [event["step"] for event in events] == [0, 1]
    assert [event["batch"] for event in events] == [[[0, 0, 3], [1, 0, 3]], [[0, 3, 1], [1, 3, 4]]]
    assert [event["finished"] for event in events] == [[], [[0, "length"], [1, "length"]]]
    assert events[0]["time"] <= events[1]["time"]


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_page_tables_replay_to_those_of_the_end_and_free_pages_add_up(model, tmp_path, overlap):
    asked = [request(i, [i] * 9, max_tokens=6) for i in range(3)]
    switches = {"kv_pages": 20, "page_size": 2, "max_running_requests": 2, "overlap": overlap}
    header, events = traced(model, tmp_path / "t", *asked, **switches)
    tables, tree = {}, []
    for event in events:
        tables |= {int(i): pages for i, pages in event["tables"].items()}
        tree = event.get("tree", tree)
        held = {page for pages in tables.values() for page in pages} | {page for node in tree for page in node[3]}
        assert event["free"] == header["pages"] - len(held)

    assert tables == {0: [], 1: [], 2: []}


def test_waiting_and_preempted_requests_are_told_apart(model, tmp_path):
    asked = [request(i, [i] * 3, max_tokens=9) for i in range(3)]
    switches = {"page_size": 1, "kv_pages": 15, "output_reserve": 0.0, "prefix_cache": "none"}
    _, events = traced(model, tmp_path / "t", *asked, max_running_requests=2, **switches)

    assert events[0]["waiting"] == [2]
    assert any(1 in event["preempted"] for event in events)
    assert all(2 not in event["preempted"] for event in events if 2 in event["waiting"])


def test_the_tree_is_written_when_it_changed_with_parents_before_children(model, tmp_path):
    asked = [request(0, [1] * 8 + [2], max_tokens=3), request(1, [1] * 4 + [3] * 5, max_tokens=3)]
    _, events = traced(model, tmp_path / "t", *asked, kv_pages=30, page_size=4)
    [*_, tree] = (event["tree"] for event in events if "tree" in event)

    assert "tree" not in events[1]  # a decode changes nothing
    assert [node[0] for node in tree] == [-1, 0, 0]
    assert [node[1] for node in tree] == [[1] * 4, [1] * 4, [3] * 4]
    assert all(node[2] == 4 * len(node[3]) for node in tree)
    assert all(node[4] == 0 for node in tree)  # nobody runs any more


def test_a_file_that_cannot_be_written_is_an_error_at_the_start(model, tmp_path):
    with pytest.raises(OSError, match="no_such_folder"):
        Engine(model, EngineConfig(kv_pages=9, trace=str(tmp_path / "no_such_folder" / "t")))


def test_a_function_takes_the_lines_too(model):
    engine, lines = Engine(model, EngineConfig(kv_pages=9)), []
    engine.trace["ours"] = Trace(lines.append, engine.scheduler)
    serve(engine, request(0, [1] * 3, max_tokens=2))
    engine.close()

    assert [set(json.loads(line)) >= {"step", "batch"} for line in lines] == [False, True, True]


def test_a_sparse_trace_skips_steps_but_not_the_last_and_loses_nobody(model):
    engine, lines = Engine(model, EngineConfig(kv_pages=30)), []
    engine.trace["ours"] = Trace(lines.append, engine.scheduler, every_s=60)
    serve(engine, *(request(i, [i] * 3, max_tokens=2 + i) for i in range(3)))
    engine.close()

    [first, last] = [json.loads(line) for line in lines[1:]]
    assert (first["step"], last["step"]) == (0, 3)
    assert last["finished"] == [[0, "length"], [1, "length"], [2, "length"]]
    assert last["free"] == 29
