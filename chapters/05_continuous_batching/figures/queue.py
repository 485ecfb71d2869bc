"""By the clock: mean time to first token against the arrival rate, and where theory puts the end."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.record import load
from chapters.figures import REQUESTS, K, Theme, V, chart, legend

LOOK = {"static": ("static", V), "continuous": ("prefill first", K), "mixed": ("mixed", REQUESTS[0])}


def draw(theme: Theme) -> Figure:
    data = load("ch05_batching")["data"]["queue"]
    rates = [point["per_s"] for point in data["curve"]]
    figure, axes = chart(theme, "requests per second", "mean time to first token, ms")
    for mode, (name, color) in LOOK.items():
        times = [point[mode]["mean_first_token_ms"] for point in data["curve"]]
        axes.plot(rates, times, marker="o", markersize=4, color=color, label=name)
        if limit := data["most_per_s"].get(mode):
            axes.axvline(limit, color=color, linestyle=(0, (3, 2)), linewidth=1.2)
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.set_yticks([50, 100, 200, 500, 1000, 2000, 5000], ["50", "100", "200", "500", "1000", "2000", "5000"])
    axes.set_xlim(left=0)
    legend(axes, theme, loc="center left", bbox_to_anchor=(0.2, 0.42))
    return figure
