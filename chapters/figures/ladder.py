"""Measured speed by chapter: the same answer, written by each chapter's engine."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.record import load
from chapters.figures import Q, Theme, chart, tint


def draw(theme: Theme) -> Figure:
    answer = load("ch02_length")["data"]["answer"]
    seconds = {"1 · recompute everything": answer["naive_s"], "2 · KV cache": answer["cached_s"]}
    rates = [answer["new_tokens"] / s for s in seconds.values()]

    figure, axes = chart(theme, "output tokens per second, one request", "", height=1.6)
    bars = axes.barh(list(seconds), rates, height=0.55, color=tint(theme, Q, 0.75))
    axes.bar_label(bars, [f"{rate:.1f}" for rate in rates], padding=4, color=theme.ink)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.12)
    axes.tick_params(axis="y", length=0)
    return figure
