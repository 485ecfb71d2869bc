"""Graphs of steps: which size holds a batch, and the rules of recorded work, which the stand-in for a CPU enforces."""

from __future__ import annotations

import re
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from minisgl_kernels.graphs import GraphError, RecordedGraph, is_capturing

from minisgl.engine.graph import StepGraphs, bucket_for, buckets

CPU = torch.device("cpu")


def captured(step):
    """A graph of a step, and the step's result."""
    graph = RecordedGraph()
    graph.warm_up(step)
    return graph, graph.capture(step)


# Sizes


@given(st.integers(1, 5000))
def test_the_largest_size_is_the_most_requests_that_run(most):
    sizes = buckets(most)

    assert sizes[-1] == most
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1


@given(st.integers(1, 2000), st.data())
def test_a_batch_goes_to_the_smallest_size_that_holds_it(most, data):
    n = data.draw(st.integers(1, most))
    size = bucket_for(n, buckets(most))

    assert size == min(s for s in buckets(most) if s >= n)
    assert size - n < max(8, 32 * (n > 256))  # of which few places are padding


def test_no_size_holds_more_than_the_largest():
    assert bucket_for(9, [1, 2, 4, 8]) == 0
    assert bucket_for(1, []) == 0


# What a replay sees


def test_a_replay_reads_what_its_inputs_hold_now():
    x = torch.arange(4.0)
    graph, y = captured(lambda: x * 2 + 1)
    x.copy_(torch.tensor([5.0, 6, 7, 8]))
    graph.replay()

    assert y.tolist() == [11, 13, 15, 17]


def test_a_replay_writes_to_the_same_result_each_time():
    x = torch.zeros(3)
    graph, y = captured(lambda: x.cumsum(0))
    at = y.data_ptr()
    for value in (1.0, 2.0):
        x.fill_(value)
        graph.replay()
        assert (y.data_ptr(), y.tolist()) == (at, [value, 2 * value, 3 * value])


def test_what_a_capture_writes_to_memory_outside_is_undone():
    x, counter = torch.ones(3), torch.zeros(3)

    def step():
        counter.add_(x)
        counter[:1].fill_(7)
        return counter * 1

    graph = RecordedGraph()
    graph.capture(step)
    assert counter.tolist() == [0, 0, 0]
    graph.replay()
    assert counter.tolist() == [7, 1, 1]
    graph.replay()
    assert counter.tolist() == [7, 2, 2]


def test_the_warm_up_runs_the_step():
    counter = torch.zeros(1)
    RecordedGraph().warm_up(lambda: counter.add_(1))

    assert counter.tolist() == [1]


def test_operations_in_place_on_memory_made_inside_start_anew_in_each_replay():
    x = torch.ones(2)

    def step():
        y = x.clone()
        y.mul_(3)
        y[1:].add_(x[1:])
        return y

    graph, y = captured(step)
    for value in (1.0, 2.0, 2.0):
        x.fill_(value)
        graph.replay()
        assert y.tolist() == [3 * value, 4 * value]


def test_views_of_memory_made_inside_follow_it():
    x = torch.arange(6.0)

    def step():
        doubled = (x * 2).view(2, 3)
        return doubled.t()[1], doubled[:, 2]

    graph, (middle, last) = captured(step)
    x.add_(1)
    graph.replay()

    assert (middle.tolist(), last.tolist()) == ([4, 10], [6, 12])


@pytest.mark.parametrize("transposed", [False, True], ids=["a view", "a copy"])
def test_operations_that_return_a_view_or_a_copy_by_layout_are_replayed(transposed):
    x = torch.arange(6.0).view(3, 2).t() if transposed else torch.arange(6.0).view(2, 3)
    graph, y = captured(lambda: x.reshape(6).contiguous() + 0)
    expected = (x + 10).reshape(6).tolist()
    x.add_(10)
    graph.replay()

    assert y.tolist() == expected


def test_each_of_several_outputs_is_filled():
    x = torch.tensor([[3.0, 1, 2], [4, 6, 5]])
    graph, (values, places) = captured(lambda: x.topk(2))
    x.copy_(torch.tensor([[1.0, 2, 3], [6, 5, 4]]))
    graph.replay()

    assert (values.tolist(), places.tolist()) == ([[3, 2], [6, 5]], [[2, 1], [0, 1]])


def test_writes_by_index_reach_memory_outside():
    pool, slots, rows = torch.zeros(5), torch.tensor([1, 2]), torch.tensor([1.0, 2.0])

    def step():
        pool[slots] = rows
        pool.index_copy_(0, slots + 2, rows * 10)

    graph, _ = captured(step)
    pool.zero_()
    slots.copy_(torch.tensor([0, 2]))
    graph.replay()

    assert pool.tolist() == [1, 0, 10, 0, 20]


def test_graphs_hand_on_through_memory_that_both_know():
    x, between, out = torch.ones(2), torch.zeros(2), torch.zeros(2)
    first, _ = captured(lambda: between.copy_(x * 2))
    second, _ = captured(lambda: out.copy_(between + x))
    for value in (3.0, 4.0):
        x.fill_(value)
        first.replay()
        second.replay()
        assert out.tolist() == [3 * value, 3 * value]


# The rules


def test_a_new_tensor_in_place_of_one_that_the_graph_reads_is_an_error():
    inputs = {"x": torch.ones(4)}
    graph, _ = captured(lambda: inputs["x"] + 1)
    inputs["x"] = torch.zeros(4)

    with pytest.raises(GraphError, match=r"a tensor \[4\] that the graph uses is gone: fill it in place, make no new"):
        graph.replay()


def test_memory_of_another_size_is_an_error():
    x = torch.ones(4)
    graph, _ = captured(lambda: x + 1)
    x.resize_(400)

    with pytest.raises(GraphError, match=r"a tensor \[4\] .* has another size now: a graph has one shape"):
        graph.replay()


@pytest.mark.parametrize(
    ("look", "name"),
    [
        (lambda x: x.sum().item(), "item"),
        (lambda x: x.tolist(), "tolist"),
        (lambda x: x.numpy(), "numpy"),
        (lambda x: x.cpu(), "cpu"),
        (lambda x: bool(x.any()), "__bool__"),
        (lambda x: int(x[0]), "__int__"),
        (lambda x: float(x[0]), "__float__"),
        (lambda x: [0, 1][x[0].long()], "__index__"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 0], "index"),
        (lambda x: x.masked_select(x > 0), "masked_select"),
        (lambda x: x.unique(), "_unique2"),
        (lambda x: torch.equal(x, x + 1), "equal"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_look_at_what_is_only_being_recorded_is_an_error(look, name):
    x = torch.zeros(4)

    with pytest.raises(GraphError, match=rf"{re.escape(name)}.* is only being recorded: a graph cannot wait for it"):
        RecordedGraph().capture(lambda: look(x))


@pytest.mark.parametrize("make", [lambda x: torch.tensor([1.0] * 4), lambda x: torch.as_tensor([1.0] * 4)])
def test_data_of_the_host_is_an_error(make):
    x = torch.zeros(4)

    with pytest.raises(GraphError, match=r"data of the host.* would be read only once: send it before"):
        RecordedGraph().capture(lambda: x + make(x))


def test_constants_and_fills_are_no_data_of_the_host():
    x = torch.ones(3)
    graph, y = captured(lambda: torch.zeros_like(x) + torch.full((3,), 2.0) + torch.arange(3) * x)
    x.fill_(10)
    graph.replay()

    assert y.tolist() == [2, 12, 22]


def test_after_a_refused_capture_nothing_is_being_recorded_and_memory_is_as_before():
    x = torch.zeros(2)

    def step():
        x.add_(1)
        return x.tolist()

    with pytest.raises(GraphError):
        RecordedGraph().capture(step)
    assert not is_capturing()
    assert x.tolist() == [0, 0]


def test_code_can_ask_whether_it_is_being_recorded():
    told = []
    captured(lambda: told.append(is_capturing()))

    assert told == [False, True]  # the warm-up, and the capture
    assert not is_capturing()


# By key


def test_steps_are_replayed_by_their_key():
    x = torch.arange(4)
    graphs = StepGraphs(CPU)
    for n in (4, 2):
        graphs.capture(("first", n), lambda n=n: x[:n] + 1)
    x.mul_(10)

    assert ("first", 2) in graphs
    assert ("first", 3) not in graphs
    assert len(graphs) == 2
    assert graphs.replay(("first", 4)).tolist() == [1, 11, 21, 31]
    assert graphs.replay(("first", 2)).tolist() == [1, 11]


def test_a_step_that_was_never_captured_cannot_be_replayed():
    with pytest.raises(KeyError):
        StepGraphs(CPU).replay(1)


def test_after_a_first_capture_that_failed_the_next_has_a_new_pool_and_later_ones_share_it(monkeypatch):
    """The memory of a pool is gone with the last graph that was to use it; a handle of it is good for nothing."""
    handles, asked = iter(range(9)), []

    class Graph:
        def warm_up(self, step):
            pass

        def capture(self, step):
            return step()

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr("minisgl.engine.graph.new_graph", lambda _, pool: asked.append(pool) or Graph())
    graphs = StepGraphs(torch.device("cuda"))
    for step in (lambda: 1 / 0, lambda: 1, lambda: 2):
        graphs.open_pool()
        with suppress(ZeroDivisionError):
            graphs.capture(step, step)

    assert len(graphs) == 2
    assert asked[0] != asked[1] == asked[2]
