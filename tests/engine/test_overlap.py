"""Steps on the device, one of them in flight: the plain engine's tokens, and nothing lost, whatever happens meanwhile.

"Plain" is the engine without graphs and overlap, which sees each token before it plans the next step.
"""

from __future__ import annotations

from dataclasses import replace

import minisgl_kernels as ops
import pytest
import torch

from minisgl.config import EngineConfig
from minisgl.core import SamplingParams
from minisgl.engine.engine import Engine
from minisgl.models.register import build_model
from minisgl.models.weight import load_weights
from minisgl.simple import naive_generate
from tests.helpers import check_pool, check_whole, hf_state, request, serve, tiny_model
from tests.tolerances import TINY_LOGITS

CPU = torch.device("cpu")
PROMPTS = [[3, 99, 14, 15, 92, 65, 35], [3, 99, 14, 15, 92, 65, 36, 1], [5] * 21, [120]]
TORCH = {"attention": "torch", "kernels": "torch"}
SMALL = {"page_size": 4, "kv_pages": 40, "max_running_requests": 4, "max_model_len": 64} | TORCH
PLAIN = {"graphs": "off", "overlap": "off"}
OVERLAP = {"graphs": "off", "overlap": "on"}
BOTH = {"graphs": "lazy", "overlap": "on"}
ways = pytest.mark.parametrize("way", [OVERLAP, BOTH], ids=["overlap", "graphs-overlap"])


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def engine_with(model, **config):
    """An engine whose pool is NaN, and whose pages come in reverse order."""
    engine = Engine(model, EngineConfig(**SMALL | config))
    engine.pool.kv[:, :, 1:] = float("nan")
    engine.pages._free.reverse()
    return engine


def greedy(model, prompt, n=8):
    return list(naive_generate(model, prompt, SamplingParams(max_tokens=n, ignore_eos=True)))


def ask(n=8, **params):
    return [request(i, prompt, max_tokens=n, **params) for i, prompt in enumerate(PROMPTS)]


def step_checked(engine, requests):
    """A step after which the pool's books are right; free pages are NaN before it."""
    engine.pool.kv[:, :, engine.pages._free] = float("nan")
    grown = engine.step()
    check_pool(engine.scheduler, requests)
    return grown


# The same tokens


@pytest.mark.parametrize("prefix_cache", ["none", "radix"])
@pytest.mark.parametrize(
    ("graphs", "overlap", "implementation"),
    [
        ("off", "on", "torch"),
        ("off", "on", "cpp"),
        ("lazy", "off", "torch"),
        ("lazy", "on", "torch"),
        ("on", "off", "torch"),
        ("on", "on", "torch"),
    ],
)
def test_chunks_preemption_and_shared_prefixes_give_the_bare_loops_tokens(
    model, graphs, overlap, implementation, prefix_cache
):
    if reason := ops.why_not(implementation, CPU, torch.float32):
        pytest.skip(reason)
    twin = build_model(model.config, ops.implementation(implementation))
    load_weights(twin, hf_state(model).items(), CPU, torch.float32)
    tight = {"kv_pages": 11, "max_batch_tokens": 6, "output_reserve": 0.0, "prefix_cache": prefix_cache}
    way = {"graphs": graphs, "overlap": overlap, "attention": implementation, "kernels": implementation}
    engine = engine_with(twin, **tight, **way)
    requests = ask(n=12)
    for r in requests:
        engine.add(r)
    while engine.has_work:
        step_checked(engine, requests)

    assert [r.output for r in requests] == [greedy(model, p, 12) for p in PROMPTS]
    assert engine.work.preemptions > 0
    assert (engine.work.graph_steps > 0) == (graphs != "off")
    check_whole(engine.scheduler)


@ways
def test_penalties_bias_min_tokens_and_logprobs_beside_others_are_those_of_the_plain_engine(model, way):
    stop = greedy(model, PROMPTS[1])[2]
    kinds = [
        {"max_tokens": 9},
        {"max_tokens": 7, "repetition_penalty": 1.5, "frequency_penalty": 0.5},
        {"max_tokens": 5, "logprobs": 3},
        {"max_tokens": 6, "min_tokens": 5, "stop_ids": [stop]},
        {"max_tokens": 4, "logit_bias": {7: 5, 9: -5}},
        {"max_tokens": 9, "temperature": 0.8, "seed": 3},
    ]

    def answers(**switches):
        requests = [request(i, PROMPTS[i % 2], **kind) for i, kind in enumerate(kinds)]
        for r in requests:
            r.seed = r.params.seed or 0
        serve(engine_with(model, **switches), *requests)
        return requests

    plain, other = answers(**PLAIN), answers(**way)
    assert [r.output for r in other] == [r.output for r in plain]
    assert len(other[2].logprobs) == 5
    for mine, its in zip(other[2].logprobs, plain[2].logprobs, strict=True):
        assert (mine.token_id, list(mine.top)) == (its.token_id, list(its.top))
        TINY_LOGITS.check(
            torch.tensor([mine.logprob, *mine.top.values()]), torch.tensor([its.logprob, *its.top.values()])
        )


@ways
def test_filtered_requests_beside_others_are_those_of_the_plain_engine(model, way):
    kinds = [{"top_k": 5}, {}, {"top_p": 0.7}, {"min_p": 0.1}, {"temperature": 0.0}]

    def answers(**switches):
        params = [{"temperature": 1.0, "max_tokens": 3 + 2 * i} | kind for i, kind in enumerate(kinds)]
        requests = [request(i, PROMPTS[i % 4], **each) for i, each in enumerate(params)]
        for r in requests:
            r.seed = 70 + r.id
        serve(engine_with(model, **switches), *requests)
        return [r.output for r in requests]

    assert answers(**way) == answers(**PLAIN)


@ways
def test_a_row_that_changes_hands_takes_the_newcomers_parameters(model, way):
    kinds = [{"temperature": 2.0, "top_k": 3}, {}, {"temperature": 0.7}, {"temperature": 1.5, "min_p": 0.2}]

    def answers(**switches):
        requests = [request(i, PROMPTS[0], max_tokens=3, **kind) for i, kind in enumerate(kinds)]
        for r in requests:
            r.seed = 5 * r.id
        serve(engine_with(model, max_running_requests=1, **switches), *requests)
        return [r.output for r in requests]

    assert answers(**way) == answers(**PLAIN)


@pytest.mark.parametrize("max_running_requests", [1, 2, 3, 5])
def test_every_number_of_running_requests_is_replayed(model, max_running_requests):
    engine = engine_with(model, max_running_requests=max_running_requests, graphs="on", overlap="on")
    requests = serve(engine, *(request(i, PROMPTS[i % 2], max_tokens=2 + i) for i in range(7)))

    assert [r.output for r in requests] == [greedy(model, PROMPTS[i % 2], 2 + i) for i in range(7)]
    stats = engine.stats()
    assert stats["graph_steps"] + stats["eager_steps_size"] == stats["steps"]  # chunks: torch's ops pad no prompts


# Overlap itself


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_read(model, monkeypatch):
    engine, order = engine_with(model, **OVERLAP), []
    launch = engine.launch

    def spied(batch):
        flight, i = launch(batch), engine.work.steps
        order.append(f"launch {i}")

        def tokens():
            order.append(f"read {i}")
            return flight.tokens()

        return replace(flight, tokens=tokens)

    monkeypatch.setattr(engine, "launch", spied)
    serve(engine, request(0, PROMPTS[0], max_tokens=3))

    assert order == ["launch 1", "launch 2", "read 1", "launch 3", "read 2", "read 3"]


def test_a_step_of_a_request_that_needs_the_host_is_launched_after_all_tokens_were_read(model):
    engine = engine_with(model, **OVERLAP)
    engine.add(request(0, PROMPTS[0], max_tokens=6))
    engine.step()
    assert len(engine.flights) == 1
    engine.add(request(1, PROMPTS[1], max_tokens=2, presence_penalty=1.0))
    engine.step()

    assert len(engine.flights) == 0
    assert [len(r.output) for r in engine.scheduler.running] == [2, 1]


@ways
def test_a_token_computed_after_the_end_of_an_answer_is_not_part_of_it(model, way):
    answer = greedy(model, PROMPTS[0])
    stop = next(token for i, token in enumerate(answer) if i >= 2 and token not in answer[:i])
    engine = engine_with(model, **way)
    short, other = request(0, PROMPTS[0], [stop], max_tokens=8), request(1, PROMPTS[1], max_tokens=8)
    serve(engine, short, other)

    assert (short.output, short.finish_reason) == (answer[: answer.index(stop) + 1], "stop")
    assert other.output == greedy(model, PROMPTS[1])
    check_whole(engine.scheduler)


def test_an_answer_that_is_full_is_not_computed_further(model):
    engine = engine_with(model, **OVERLAP)
    serve(engine, request(0, PROMPTS[0], max_tokens=5))

    assert engine.work.steps == 5
    assert engine.work.tokens_computed == len(PROMPTS[0]) + 4


@ways
def test_an_abort_while_a_step_is_in_flight_drops_its_token_and_gives_back_its_pages(model, way):
    engine, requests = engine_with(model, **way), ask()
    for r in requests:
        engine.add(r)
    for _ in range(4):
        step_checked(engine, requests)
    known = list(requests[1].tokens)
    assert requests[1].in_flight == 1
    engine.abort(1)
    check_pool(engine.scheduler, requests)
    assert requests[1] in step_checked(engine, requests)
    while engine.has_work:
        step_checked(engine, requests)

    assert (requests[1].tokens, requests[1].finish_reason) == (known, "abort")
    assert [r.output for r in requests if r.id != 1] == [greedy(model, p) for i, p in enumerate(PROMPTS) if i != 1]
    check_whole(engine.scheduler)


@ways
def test_when_all_are_aborted_nothing_stays_in_flight(model, way):
    engine, requests = engine_with(model, **way), ask()
    for r in requests:
        engine.add(r)
    engine.step()
    engine.step()
    for r in requests:
        engine.abort(r.id)

    assert set(engine.step()) == set(requests)
    assert not engine.has_work
    assert (len(engine.flights), engine.step()) == (0, [])
    check_whole(engine.scheduler)


@ways
def test_a_step_returns_who_got_a_token_or_ended_each_once(model, way):
    engine = engine_with(model, max_batch_tokens=4, **way)
    short, long, refused = request(0, [1, 2], max_tokens=1), request(1, [3] * 9, max_tokens=3), request(2, [])
    for r in (short, long, refused):
        engine.add(r)

    told = []
    while engine.has_work:
        grown = engine.step()
        assert len(set(grown)) == len(grown)
        told += grown
    assert sorted(r.id for r in told) == [0, 1, 1, 1, 2]


def test_nan_ends_the_one_request_whose_logits_hold_it(model):
    engine, requests = engine_with(model, prefix_cache="none", **BOTH), ask()
    for r in requests:
        engine.add(r)
    for _ in range(3):
        engine.step()
    engine.pool.kv[:, :, requests[1].pages[0]] = float("nan")
    serve(engine)

    assert (requests[1].finish_reason, "NaN" in requests[1].error) == ("error", True)
    assert [r.output for r in requests if r.id != 1] == [greedy(model, p) for i, p in enumerate(PROMPTS) if i != 1]


# Interruptions


def interrupt(monkeypatch, owner, name, after=False, error=KeyboardInterrupt):
    """Let the next call of a method fail, before or after it has done its work; the calls after it do not."""
    method = getattr(owner, name)

    def fails(*args, **kwargs):
        monkeypatch.setattr(owner, name, method)
        if after:
            method(*args, **kwargs)
        raise error

    monkeypatch.setattr(owner, name, fails)


@ways
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("where", ["update", "send", "_replay", "_eager", "_fetch"])
def test_a_failed_launch_loses_nothing(model, way, where, after, monkeypatch):
    engine, requests = engine_with(model, max_batch_tokens=9, **way), ask(n=9)
    owners = {"update": engine.runner.rows, "send": engine.runner.rows._changes}
    for r in requests:
        engine.add(r)
    failed = 0
    for turn in range(60):
        if turn % 3 == 1:  # with a step in flight
            interrupt(monkeypatch, owners.get(where, engine.runner), where, after)
        try:
            step_checked(engine, requests)
        except KeyboardInterrupt:
            failed += 1
        if not engine.has_work:
            break

    assert failed > 0 or (where == "_replay" and way is OVERLAP)
    assert [r.output for r in requests] == [greedy(model, p, 9) for p in PROMPTS]
    check_whole(engine.scheduler)


@ways
def test_ctrl_c_while_waiting_for_tokens_loses_nothing(model, way, monkeypatch):
    engine, requests = engine_with(model, **way), ask(n=9)
    launch = engine.launch

    def launch_what_is_interrupted_once(batch):
        flight, waited = launch(batch), []

        def tokens():
            if engine.work.steps % 3 == 2 and not waited:
                waited.append(True)
                raise KeyboardInterrupt
            return flight.tokens()

        return replace(flight, tokens=tokens)

    monkeypatch.setattr(engine, "launch", launch_what_is_interrupted_once)
    for r in requests:
        engine.add(r)
    interrupts = 0
    while engine.has_work:
        try:
            step_checked(engine, requests)
        except KeyboardInterrupt:
            interrupts += 1
            check_pool(engine.scheduler, requests)

    assert interrupts > 1
    assert [r.output for r in requests] == [greedy(model, p, 9) for p in PROMPTS]
    check_whole(engine.scheduler)


@ways
def test_aborts_after_an_interrupted_wait_end_everything(model, way, monkeypatch):
    engine = engine_with(model, page_size=1, **way)
    engine.add(r := request(0, PROMPTS[0], max_tokens=9))
    engine.step()
    engine.flights[0].tokens = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert r.in_flight == 2
    engine.abort(0)
    for flight in engine.flights:
        flight.tokens = lambda: [1]
    engine.step()

    assert (r.output, engine.has_work) == ([], False)
    check_whole(engine.scheduler)


def test_an_engine_may_be_closed_with_a_step_in_flight(model):
    engine = engine_with(model, **BOTH)
    engine.add(request(0, PROMPTS[0]))
    engine.step()
    engine.step()
    engine.abort(0)
    engine.close()
    engine.close()

    assert len(engine.flights) == 0
    assert engine.stats()["kv_pool_bytes"] == 0


# Beside one another, and what is told


def test_two_engines_with_graphs_on_one_model_do_not_meet(model):
    engines = [engine_with(model, **BOTH) for _ in range(2)]
    requests = [request(0, p, max_tokens=8) for p in PROMPTS[:2]]
    for engine, r in zip(engines, requests, strict=True):
        engine.add(r)
    while any(engine.has_work for engine in engines):
        for engine, r in zip(engines, requests, strict=True):
            step_checked(engine, [r])

    assert [r.output for r in requests] == [greedy(model, p) for p in PROMPTS[:2]]


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"presence_penalty": 1.0}, "penalties"),
        ({"logit_bias": {3: 1.0}}, "logit_bias"),
        ({"min_tokens": 2, "stop_ids": [130]}, "min_tokens"),
        ({"logprobs": 0}, "logprobs"),
    ],
)
def test_stats_tell_which_steps_no_graph_held_and_why(model, params, reason):
    engine = engine_with(model, **BOTH)
    serve(engine, request(0, PROMPTS[0], max_tokens=4))
    stats = engine.stats()
    assert (stats["steps"], stats["graph_steps"], stats["eager_steps_size"]) == (4, 3, 1)

    serve(engine, request(1, PROMPTS[1], max_tokens=4, **params))
    stats = engine.stats()
    assert (stats["steps"], stats["graph_steps"], stats[f"eager_steps_{reason}"]) == (8, 3, 4)


@pytest.mark.parametrize("way", [PLAIN, OVERLAP], ids=["plain", "overlap"])
def test_without_graphs_no_step_counts_as_one_that_no_graph_held(model, way):
    engine = engine_with(model, **way)
    serve(engine, request(0, PROMPTS[0], max_tokens=4))

    stats = engine.stats()
    assert stats["graph_steps"] == 0
    assert [name for name in stats if name.startswith("eager_steps")] == []


@ways
def test_work_is_counted_as_by_the_plain_engine(model, way):
    def counts(**switches):
        engine = engine_with(model, **switches)
        serve(engine, request(0, PROMPTS[2], max_tokens=5))
        return replace(engine.work, graph_steps=0)

    assert counts(**way) == counts(**PLAIN)


@pytest.mark.parametrize("config", [{"attention": "cpp"}, {"kernels": "cpp"}])
def test_graphs_on_a_cpu_are_refused_for_ops_that_the_stand_in_does_not_see(model, config):
    if reason := ops.why_not("cpp", CPU, torch.float32):
        pytest.skip(reason)
    with pytest.raises(ValueError, match=r"graphs=on on cpu is a stand-in.*--attention torch and --kernels torch"):
        engine_with(model, graphs="on", **config)


@pytest.mark.parametrize("field", ["graphs", "overlap"])
def test_without_pages_there_are_no_graphs_and_no_overlap(field):
    with pytest.raises(ValueError, match=f"{field} is on, but must be off without a paged KV cache"):
        EngineConfig(kv_cache="contiguous", **{field: "on"})
