"""Measured: milliseconds for one more token against the tokens before it, without and with a cache."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.record import load
from chapters.figures import NEW, K, Theme, chart, legend


def draw(theme: Theme) -> Figure:
    curve = load("ch02_length")["data"]["curve"]
    lengths = [point["length"] for point in curve]
    figure, axes = chart(theme, "tokens in the sequence", "ms for the next token")
    for key, name, color in [("naive_ms", "chapter 1: recompute", NEW), ("cached_ms", "chapter 2: cache", K)]:
        milliseconds = [point[key] for point in curve]
        axes.plot(lengths, milliseconds, marker="o", color=color, label=name)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    legend(axes, theme, loc="upper left")
    return figure
