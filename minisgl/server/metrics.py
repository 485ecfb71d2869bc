"""What Prometheus reads at /metrics. Counts are plain ints while the server runs; a scrape words them.

Names are vLLM's where it has the same thing, with our prefix.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from minisgl.message.messages import Gauges
from minisgl.tokenizer.answer import Completion

_FIRST = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640]
_BETWEEN = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40]
_WHOLE = [0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 3600]


class Histogram:
    """How often a time fell between two bounds."""

    def __init__(self, bounds: list[float]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Prometheus's: how often it was at most each bound."""
        labels, total = [*map(str, self.bounds), "+Inf"], 0
        return [(label, total := total + count) for label, count in zip(labels, self.counts, strict=True)]


class Metrics:
    """What the front counts, and the engine's gauges as `gauges()` has them at a scrape."""

    def __init__(self, gauges: Callable[[], Gauges]) -> None:
        self.gauges, self.memory_alarm = gauges, False
        self.prompt_tokens = self.generation_tokens = self.cached_tokens = 0
        self.tokens_per_s = 0.0
        self.finished, self.errors, self.aborted = Counter[str](), Counter[str](), Counter[str]()
        self.first, self.between, self.whole = Histogram(_FIRST), Histogram(_BETWEEN), Histogram(_WHOLE)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def ended(self, completion: Completion, waited_s: float, streamed: bool) -> None:
        """Count an answer that came to its end, and `waited_s` before it was submitted."""
        tokens = len(completion.token_ids)
        self.prompt_tokens += completion.prompt_tokens if completion.index == 0 else 0
        self.cached_tokens += completion.cached_tokens if completion.index == 0 else 0
        self.finished[completion.finish_reason or "abort"] += 1
        if tokens:
            self.first.observe(waited_s + completion.first_token_s)
            self.whole.observe(waited_s + completion.total_s)
        if tokens > 1 and not streamed:
            self.between.observe((completion.total_s - completion.first_token_s) / (tokens - 1), tokens - 1)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        now = self.gauges()
        used = now.pages - now.pages_available
        for name, value, text in (
            ("num_requests_running", now.running, "Answers in the batch."),
            ("num_requests_waiting", now.waiting, "Answers in the queue."),
            ("kv_cache_usage_perc", used / now.pages if now.pages else 0.0, "Share of pages held by running answers."),
            ("kv_cache_pages_cached", now.pages_cached, "Pages held by the prefix cache."),
            ("prefix_cache_hit_rate", self._hit_rate(), "Share of the prompts' tokens found in the prefix cache."),
            ("generation_tokens_per_second", self.tokens_per_s, "Tokens generated in the last second."),
            ("memory_alarm", self.memory_alarm, "1 while more pages are in use than --memory-alarm allows."),
        ):
            yield GaugeMetricFamily(f"minisgl:{name}", text, value)
        for name, count, text in (
            ("prompt_tokens", self.prompt_tokens, "Tokens of answered prompts."),
            ("generation_tokens", self.generation_tokens, "Tokens of answers."),
            ("prefix_cache_hits", self.cached_tokens, "Tokens of answered prompts found in the prefix cache."),
            ("num_preemptions", now.preemptions, "Answers that lost their pages and began anew."),
            ("steps", now.steps, "Steps of the engine."),
        ):
            yield CounterMetricFamily(f"minisgl:{name}", text, count)
        for name, label, counts, text in (
            ("request_success", "finished_reason", self.finished, "Answers that ended by themselves."),
            ("request_aborts", "reason", self.aborted, "Answers that were cut off."),
            ("http_errors", "code", self.errors, "Requests answered with an error."),
        ):
            family = CounterMetricFamily(f"minisgl:{name}", text, labels=[label])
            for key, num in sorted(counts.items()):
                family.add_metric([key], num)
            yield family
        for name, histogram, text in (
            ("time_to_first_token_seconds", self.first, "From the request to its first token."),
            ("inter_token_latency_seconds", self.between, "Between the tokens of an answer."),
            ("e2e_request_latency_seconds", self.whole, "From the request to its end."),
        ):
            yield HistogramMetricFamily(f"minisgl:{name}", text, histogram.buckets(), histogram.sum)

    def _hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
