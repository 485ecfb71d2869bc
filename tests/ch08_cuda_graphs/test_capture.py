"""Task 08.5: a step is run once, then recorded, and its result is where replays leave theirs."""

from __future__ import annotations

import pytest
import torch
from minisgl_kernels.graphs import is_capturing, new_graph

from minisgl.engine.graph import StepGraphs
from tests.ch08_cuda_graphs.scene import DEVICE


@pytest.fixture
def graphs():
    return StepGraphs(DEVICE)


def test_a_replay_sees_what_the_memory_holds_then(graphs):
    inputs = torch.tensor([1, 2], device=DEVICE)
    graphs.capture("double", lambda: inputs * 2)

    inputs.copy_(torch.tensor([5, 6], device=DEVICE))

    assert graphs.replay("double").tolist() == [10, 12], "keep what graph.capture(step) returned: replays fill that"


def test_the_step_runs_once_for_real_before_it_is_recorded(graphs):
    seen = []
    inputs = torch.ones(3, device=DEVICE)

    def step():
        seen.append(is_capturing())
        return inputs + 1

    graphs.capture("step", step)
    assert seen == [False, True], "warm_up runs the step for real, then capture records it"


def test_the_graph_itself_warms_up_as_it_knows_on_which_stream(graphs, monkeypatch):
    log = []

    class Logged:
        def warm_up(self, step):
            log.append("warm_up")

        def capture(self, step):
            log.append("capture")

    monkeypatch.setattr("minisgl.engine.graph.new_graph", lambda device, pool: Logged())
    graphs.capture("step", lambda: None)

    assert log == ["warm_up", "capture"], "graph.warm_up(step), which takes the stream of the capture; not step()"


def test_what_a_step_does_at_its_first_run_only_is_not_recorded(graphs):
    """Compiling, choosing among kernels: some of it waits for the GPU, which a capture may not."""
    inputs, choice = torch.ones(3, device=DEVICE), []

    def step():
        if not choice:
            choice.append(inputs.sum().item())
        return inputs * choice[0]

    graphs.capture("step", step)
    assert graphs.replay("step").tolist() == [3, 3, 3]


def test_a_recording_runs_the_step_once_and_each_replay_once_more(graphs):
    count, inputs = torch.zeros(1, device=DEVICE), torch.zeros(1, device=DEVICE)

    graphs.capture("step", lambda: count.add_(1) + inputs)
    assert count.item() == 1, "the warm-up counts, the recording does not"

    graphs.replay("step")
    graphs.replay("step")
    assert count.item() == 3


def test_a_graph_is_found_by_its_name(graphs):
    inputs = torch.tensor([7], device=DEVICE)
    graphs.capture((0, 4, False), lambda: inputs + 1)
    graphs.capture((0, 8, False), lambda: inputs + 2)

    assert [graphs.replay((0, n, False)).item() for n in (4, 8)] == [8, 9]
    assert (0, 8, True) not in graphs
    assert len(graphs) == 2


def test_all_graphs_take_their_memory_from_one_pool(graphs, monkeypatch):
    asked = []

    def noted(device, pool=None):
        asked.append((device, pool))
        return new_graph(device, None)

    monkeypatch.setattr("minisgl.engine.graph.new_graph", noted)
    graphs._pool = "the pool"
    inputs = torch.ones(1, device=DEVICE)
    for key in range(3):
        graphs.capture(key, lambda: inputs + 1)

    assert asked == [(DEVICE, "the pool")] * 3
