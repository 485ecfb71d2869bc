"""What Prometheus reads."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from minisgl.message.messages import Gauges
from minisgl.server.metrics import Histogram, Metrics
from minisgl.tokenizer.answer import Completion

ASKED = {"model": "tiny", "prompt": "measure this", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def samples(text: str) -> dict[str, float]:
    """Each sample by its name and labels."""
    return {
        sample.name + "".join(f" {value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_bucket_counts_what_is_at_most_its_bound():
    histogram = Histogram([1, 2, 4])
    for value in (0.5, 1, 1.5, 2, 4.5):
        histogram.observe(value)
    histogram.observe(3, times=10)

    assert histogram.buckets() == [("1", 2), ("2", 4), ("4", 14), ("+Inf", 15)]
    assert histogram.sum == 9.5 + 30


def test_an_answer_counts_its_times_and_its_prompt_once():
    metrics = Metrics(lambda: Gauges(pages=100, pages_available=75, running=3, waiting=2))
    for index in (0, 1):
        metrics.ended(
            Completion(
                10,
                index=index,
                token_ids=[1] * 5,
                finish_reason="stop",
                cached_tokens=4,
                first_token_s=1.0,
                total_s=3.0,
            ),
            waited_s=0.5,
            streamed=False,
        )
    read = samples(metrics.text().decode())

    assert (read["minisgl:prompt_tokens_total"], read["minisgl:prefix_cache_hits_total"]) == (10, 4)
    assert read["minisgl:prefix_cache_hit_rate"] == 0.4
    assert read["minisgl:request_success_total stop"] == 2
    assert (read["minisgl:time_to_first_token_seconds_sum"], read["minisgl:time_to_first_token_seconds_count"]) == (
        3,
        2,
    )
    assert (read["minisgl:inter_token_latency_seconds_sum"], read["minisgl:inter_token_latency_seconds_count"]) == (
        4,
        8,
    )
    assert (read["minisgl:e2e_request_latency_seconds_sum"], read["minisgl:num_requests_waiting"]) == (7, 2)
    assert read["minisgl:kv_cache_usage_perc"] == 0.25


@pytest.mark.xdist_group("server")
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_moves_the_counters(server, stream):
    before = samples(server.ask("/metrics").text)
    server.ask("/v1/completions", ASKED | {"stream": stream})
    server.ask("/v1/completions", ASKED | {"temperature": -1})
    after = samples(server.ask("/metrics").text)

    moved = {name: value - before.get(name, 0) for name, value in after.items()}
    assert moved["minisgl:generation_tokens_total"] == 8
    assert moved["minisgl:prompt_tokens_total"] == len("measure this")
    assert moved["minisgl:request_success_total length"] == 1
    assert moved["minisgl:http_errors_total 400"] == 1
    assert moved["minisgl:time_to_first_token_seconds_count"] == 1
    assert moved["minisgl:inter_token_latency_seconds_count"] == 7
    assert moved["minisgl:e2e_request_latency_seconds_count"] == 1
    assert moved["minisgl:steps_total"] >= 8


@pytest.mark.xdist_group("server")
def test_it_is_prometheuss_text(server):
    answer = server.ask("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
