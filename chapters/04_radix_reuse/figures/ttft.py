"""Measured: time to first token of a prompt whose first n tokens somebody sent before."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.record import load
from chapters.figures import NEW, K, Theme, chart, legend


def draw(theme: Theme) -> Figure:
    data = load("ch04_reuse")["data"]
    figure, axes = chart(theme, f"shared tokens, of {data['curve_tokens']:,}", "seconds to the first token")
    shared = [point["shared_tokens"] for point in data["curve"]]
    for key, name, color in [("none_ms", "without the tree", NEW), ("radix_ms", "with the tree", K)]:
        axes.plot(shared, [point[key] / 1e3 for point in data["curve"]], marker="o", color=color, label=name)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    legend(axes, theme, loc="lower left")
    return figure
