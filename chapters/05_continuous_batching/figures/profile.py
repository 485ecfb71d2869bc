"""Measured: where the time of a decode step goes, for one request and for eight."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.record import load
from chapters.figures import NEW, PAGE, REQUESTS, WEIGHTS, K, Theme, V, chart, legend, tint

COLORS = {
    "linear layers": WEIGHTS,
    "attention": K,
    "norms": V,
    "rotation": REQUESTS[5],
    "activation": REQUESTS[4],
    "sampling": REQUESTS[3],
    "host": NEW,
    "the rest": PAGE,
}


def draw(theme: Theme) -> Figure:
    profiles = load("ch05_batching")["data"]["profile"]
    figure, axes = chart(theme, "share of a decode step, in per cent", "", height=2.4)
    for y, entry in enumerate(profiles):
        left = 0.0
        for part, color in COLORS.items():
            share = 100 * entry["shares"].get(part, 0.0)
            axes.barh(y, share, left=left, color=tint(theme, color, 0.85), label=None if y else part, height=0.6)
            left += share
    axes.set_yticks(range(len(profiles)), [f"{p['batch']} request{'s' * (p['batch'] > 1)}" for p in profiles])
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.grid(visible=False, axis="y")
    legend(axes, theme, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, fontsize=8)
    return figure
