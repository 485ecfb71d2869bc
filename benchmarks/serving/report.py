"""What is made of the times of many requests. Knows neither server nor workload.

    first token (TTFT)    from when a request should have been sent to the first piece of its answer
    between tokens (ITL)  time between two pieces, by the tokens in the later one, and once for each of them; where the
                          server does not say how many those were, all pieces of an answer behind its first share its
                          tokens evenly
    between pieces        time between two pieces as a reader sees it, however many tokens came
    per token (TPOT)      of a whole answer: the time behind its first token, by the tokens behind the first
    end to end (E2E)      from when a request should have been sent to the last byte of its answer

Failed requests are counted by kind and stand in no other figure. A percentile is a value that occurred: the smallest
that is not below so many in a hundred.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.serving.client import Sample
from benchmarks.serving.load import Pass

LATENCIES = {
    "first_token_ms": "first token (TTFT)",
    "between_tokens_ms": "between tokens (ITL)",
    "between_pieces_ms": "between pieces",
    "per_token_ms": "per token (TPOT)",
    "end_to_end_ms": "end to end (E2E)",
}
TARGETS = {"ttft": "first_token_ms", "tpot": "per_token_ms", "e2e": "end_to_end_ms"}
FIGURES = ("seconds", "requests_per_s", "tokens_per_s", "prompt_tokens_per_s", "goodput_per_s", *LATENCIES)
LAG_S, BUSY = 0.02, 0.9  # beyond these the client is part of what is measured


def targets(text: str) -> dict[str, float]:
    """ttft=500ms,tpot=0.05s → {"first_token_ms": 500, "per_token_ms": 50}.

    Raises:
        ValueError: an unknown name, or no time.
    """
    found: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, _, value = part.strip().partition("=")
        number, factor = (value[:-2], 1.0) if value.endswith("ms") else (value.removesuffix("s"), 1000.0)
        try:
            if not value.endswith("s") or not float(number) > 0:
                raise ValueError
            found[TARGETS[name]] = factor * float(number)
        except (KeyError, ValueError):
            raise ValueError(
                f"{part!r} is no target: write {', '.join(TARGETS)} with a time, as in ttft=500ms"
            ) from None
    return found


def summary(done: Pass, slo: dict[str, float]) -> dict[str, Any]:
    """All figures of a pass.

    Args:
        slo: the most milliseconds by latency; goodput counts requests that met all.
    """
    good = [sample for sample in done.samples if not sample.error]
    seconds = done.seconds or float("nan")
    each = [latencies(sample) for sample in good]
    met = sum(all(own.get(name, 0.0) <= most for name, most in slo.items()) for own in each)
    gaps, tokens = between([sample for sample in good if sample.times])
    spread = {name: [own[name] for own in each if name in own] for name in LATENCIES}
    figures: dict[str, Any] = {name: percentiles(values) for name, values in spread.items()}
    figures["between_pieces_ms"] = percentiles(gaps)
    figures["between_tokens_ms"] = percentiles([g / n for g, n in zip(gaps, tokens, strict=True)], tokens)
    output = sum(sample.output_tokens for sample in good)
    prompt = sum(sample.prompt_tokens for sample in good)
    return {
        "requests": len(done.samples),
        "completed": len(good),
        "errors": dict(Counter(sample.error for sample in done.samples if sample.error)),
        "first_error": next((f"{s.error}: {s.detail}" for s in done.samples if s.error), ""),
        "finish_reasons": dict(Counter(sample.finish_reason for sample in good)),
        "prompt_tokens": prompt,
        "cached_tokens": sum(sample.cached_tokens for sample in good),
        "output_tokens": output,
        "asked_tokens": sum(sample.max_tokens for sample in good),
        "seconds": done.seconds,
        "requests_per_s": len(good) / seconds,
        "tokens_per_s": output / seconds,
        "prompt_tokens_per_s": prompt / seconds,
        "goodput_per_s": met / seconds if slo else None,
        "slo_met": met if slo else None,
        **figures,
        "client": client(done),
    }


def latencies(sample: Sample) -> dict[str, float]:
    """Of one request, in milliseconds; an answer in one piece has only the last."""
    found = {"end_to_end_ms": 1000 * (sample.ended - sample.planned)}
    if sample.times:
        found["first_token_ms"] = 1000 * (sample.times[0] - sample.planned)
        if sample.output_tokens > 1:
            found["per_token_ms"] = 1000 * (sample.times[-1] - sample.times[0]) / (sample.output_tokens - 1)
    return found


def between(samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Milliseconds between pieces, and how many tokens the later one of each two had."""
    gaps, tokens = list[float](), list[float]()
    for sample in samples:
        own = [1000 * (later - sooner) for sooner, later in pairwise(sample.times)]
        gaps += own
        if all(sample.counts):
            tokens += [max(1, later - sooner) for sooner, later in pairwise(sample.counts)]
        else:
            tokens += [max(1.0, (sample.output_tokens - 1) / len(own))] * len(own) if own else []
    return gaps, tokens


def percentiles(values: Sequence[float], weights: Sequence[float] | None = None) -> dict[str, float] | None:
    """Mean, p50, p90 and p99 of values that stand for as many as their weights say; None of nothing."""
    if not values:
        return None
    order = np.argsort(values)
    ordered = np.asarray(values, dtype=float)[order]
    weight = np.ones(len(values)) if weights is None else np.asarray(weights, dtype=float)[order]
    reached = np.cumsum(weight) / weight.sum()
    found = {"mean": float(np.average(ordered, weights=weight))}
    for percent in (50, 90, 99):
        place = int(np.searchsorted(reached, percent / 100 - 1e-12))
        found[f"p{percent}"] = float(ordered[min(place, len(values) - 1)])
    return found


def client(done: Pass) -> dict[str, float]:
    """How late the client itself was."""
    late = [sample.started - sample.planned for sample in done.samples if sample.started and sample.planned]
    lags = percentiles(done.lags_s) or {"p99": 0.0}
    return {
        "lag_p99_ms": 1000 * lags["p99"],
        "lag_max_ms": 1000 * max(done.lags_s, default=0.0),
        "latest_start_ms": 1000 * max(late, default=0.0),
        "busy": done.busy,
    }


def lines(name: str, found: dict[str, Any]) -> list[str]:
    """A pass for a terminal."""
    head = f"{name}: {found['completed']} of {found['requests']} requests in {found['seconds']:,.2f} s"
    head += f" · {found['requests_per_s']:,.2f} requests/s · {found['tokens_per_s']:,.1f} output tokens/s"
    if found["goodput_per_s"] is not None:
        head += f" · goodput {found['goodput_per_s']:,.2f} requests/s ({found['slo_met']} met the target)"
    shown = [head]
    for figure, label in LATENCIES.items():
        if values := found[figure]:
            shown.append(f"  {label:<21}" + " · ".join(f"{n} {ms:,.2f}" for n, ms in values.items()) + " ms")
    tokens = f"  {found['prompt_tokens']:,} prompt tokens, {found['cached_tokens']:,} of them cached"
    shown.append(tokens + f"; {found['output_tokens']:,} of {found['asked_tokens']:,} output tokens")
    if found["errors"]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in found["errors"].items())
        shown.append(f"  failed: {kinds}. The first: {found['first_error']}")
    own = found["client"]
    if own["lag_p99_ms"] > 1000 * LAG_S or own["busy"] > BUSY:
        shown.append(
            f"  the client itself lags: its event loop was {own['lag_p99_ms']:,.1f} ms late (p99) and its thread busy "
            f"{own['busy']:.0%} of the time. These are the figures of server and client together"
        )
    return shown
