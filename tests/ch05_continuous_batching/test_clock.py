"""The page's predictions, checked: the clock of benchmarks/ch05_clock.py agrees with a pencil, and with the engine."""

from __future__ import annotations

import json

import pytest

from benchmarks.ch05_clock import MODES, Cost, Job, by_hand, make_request, mixture, most_per_s, simulate, switches
from minisgl.config import EngineConfig
from minisgl.engine.engine import Engine
from tests.helpers import tiny_model

BY_HAND = {  # (milliseconds, how often)
    "static": [(25, 1), (10.2, 2), (10.1, 5), (45, 1), (10.2, 3)],
    "continuous": [(15, 1), (20, 1), (40, 1), (15, 1), (10.4, 2), (10.3, 1), (10.1, 4)],
    "chunked": [(20, 5), (10.4, 2), (10.3, 1), (10.1, 4)],
    "mixed": [(20, 5), (10.8, 1), (10.3, 2), (10.1, 1)],
}


@pytest.mark.parametrize("mode", MODES)
def test_the_four_requests_take_what_a_pencil_says(mode):
    run = simulate(by_hand(), switches(mode, max_batch_tokens=100, max_running_requests=4))
    assert len(run.steps) == sum(n for _, n in BY_HAND[mode])
    assert run.makespan_ms == pytest.approx(sum(ms * n for ms, n in BY_HAND[mode]))
    assert [len(times) for times in run.token_ms.values()] == [8, 3, 4, 4]


@pytest.mark.parametrize("mode", MODES)
def test_the_engine_makes_the_steps_that_the_clock_makes(mode, tmp_path):
    jobs = [Job(0, 10 + 13 * i, 5 + 2 * i) for i in range(6)]
    limits = {"max_batch_tokens": 24, "max_running_requests": 4}
    expected = [[list(row) for row in step] for _, _, step in simulate(jobs, switches(mode, **limits)).steps]

    trace = tmp_path / "trace"
    engine = Engine(tiny_model(), switches(mode, **limits, kv_pages=100, max_model_len=128, trace=str(trace)))
    for i, job in enumerate(jobs):
        request = make_request(i, job)
        request.stop_ids = frozenset()
        engine.add(request)
    while engine.has_work:
        engine.step()

    events = [json.loads(line) for line in trace.read_text().splitlines()[1:]]
    assert [event["batch"] for event in events] == expected


def test_no_schedule_is_faster_than_full_steps():
    jobs, budget = mixture(60, seed=3), 64
    run = simulate(jobs, switches("mixed", max_batch_tokens=budget, max_running_requests=60))
    needed = sum(job.prompt + job.output - 1 for job in jobs)
    assert run.tokens_computed == needed
    least_ms = needed / budget * Cost().of(budget)
    tail_ms = 128 * Cost().of(budget)  # at the end nobody waits, and steps of decodes are not full
    assert least_ms <= run.makespan_ms <= least_ms + tail_ms


@pytest.mark.parametrize("mode", ["continuous", "mixed"])
def test_the_queue_grows_above_the_predicted_rate_and_not_below(mode):
    prompt, output, budget, rows = 272, 72, 256, 96
    limit = most_per_s(mode, Cost(), budget, rows, prompt, output)

    def mean_wait(rate: float, count: int) -> float:
        jobs = mixture(count, seed=2, per_s=rate)
        config = switches(mode, max_batch_tokens=budget, max_running_requests=rows)
        return sum(simulate(jobs, config).first_token_ms) / count

    assert mean_wait(0.8 * limit, 160) < 1.5 * mean_wait(0.8 * limit, 80)
    assert mean_wait(1.5 * limit, 160) > 1.5 * mean_wait(1.5 * limit, 80)


def test_the_chapters_engine_is_mixed_and_chunked():
    config = EngineConfig.chapter(5)
    assert (config.batching, config.chunked_prefill, config.prefix_cache) == ("mixed", True, "radix")
