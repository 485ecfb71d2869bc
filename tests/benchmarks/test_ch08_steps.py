"""Step times by way and batch: on a tiny model with the stand-in, and what the clock counts as a wait."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks import ch08_steps
from minisgl.llm import LLM
from tests.helpers import hf_json, tiny_config


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    """A config without weights, of a context so short that the stand-in is quick."""
    folder = tmp_path_factory.mktemp("shape")
    (folder / "config.json").write_text(json.dumps(hf_json(tiny_config(max_position_embeddings=96))))
    return folder


def test_every_way_is_measured_at_every_batch(shape, tmp_path):
    path = tmp_path / "steps.json"
    options = f"--model {shape} --device cpu --batch 2 --context 24 --steps 3 --json {path}"
    ch08_steps.main(options.split())
    ways = json.loads(path.read_text())["data"]["ways"]
    assert list(ways) == list(ch08_steps.WAYS)
    for way, rows in ways.items():
        assert list(rows) == ["2"]
        for batch, row in rows.items():
            assert row["batch"] == int(batch)
            assert row["graph_steps"] == (3 if "graph" in way else 0)
            assert 0 < sum(row["parts_ms"].values()) < 2 * row["step_ms"]
            assert row["host_ms"] <= row["slowest_ms"]


@pytest.mark.parametrize("way", ch08_steps.WAYS)
def test_the_ways_differ_in_graphs_and_overlap_only(way):
    config = ch08_steps.config(way, "some", "cuda")
    assert (config.graphs != "off") == ("graph" in way)
    assert (config.overlap == "on") == ("overlap" in way)
    assert (config.attention, config.kernels, config.max_batch_tokens) == ("auto", "auto", 16_384)


def test_the_context_is_as_asked_in_the_middle_of_the_steps_that_count():
    [request] = ch08_steps.requests(1, 512, 48, 1000)
    assert request.prompt_len + ch08_steps.SETTLE + 24 == 512
    assert request.params.max_tokens >= ch08_steps.SETTLE + 48


def test_waits_are_in_no_part(monkeypatch):
    now = [0.0]

    def work(seconds):
        now[0] += seconds

    def plan():
        work(2)
        torch.cuda.Event.synchronize(None)
        work(1)

    monkeypatch.setattr(ch08_steps, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda _: work(50))
    engine = SimpleNamespace(scheduler=SimpleNamespace(plan=plan, retire=work), launch=work)
    clock = ch08_steps.HostClock()
    with clock.watch(engine):
        engine.scheduler.plan()
        engine.launch(4)
        torch.cuda.Event.synchronize(None)
    engine.launch(8)  # after the watch
    assert clock.parts == {"plan": 3, "launch": 4, "retire": 0}
    assert clock.waited == 100


def test_more_requests_than_run_side_by_side_are_refused(shape):
    with LLM(ch08_steps.config("eager", str(shape), "cpu")) as llm:
        llm.engine.scheduler._free_rows = [0, 1]
        with pytest.raises(ValueError, match="side by side"):
            ch08_steps.measure(llm, batch=3, context=24, steps=4)
