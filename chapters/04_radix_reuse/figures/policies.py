"""Counted: hit rates of the eviction policies for three patterns of requests, by the size of the pool."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.record import load
from chapters.figures import REQUESTS, Theme

STYLES = {"lru": "-", "lfu": "--", "fifo": ":"}


def draw(theme: Theme) -> Figure:
    patterns = load("ch04_reuse")["data"]["policies"]
    figure = Figure(figsize=(8.4, 2.9), layout="constrained")
    panels = figure.subplots(1, len(patterns), sharey=True)
    for axes, (name, pattern) in zip(panels, patterns.items(), strict=True):
        for (policy, rates), color in zip(pattern["hit_rate"].items(), REQUESTS, strict=False):
            line = {"color": color, "linestyle": STYLES[policy], "marker": "o", "markersize": 3.5, "label": policy}
            axes.plot(pattern["pool_pages"], [100 * rate for rate in rates], **line)
        axes.patch.set_alpha(0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(theme.muted)
        axes.tick_params(colors=theme.muted, labelcolor=theme.ink)
        axes.grid(color=theme.faint, linewidth=0.8)
        axes.set_title(name, color=theme.ink, fontsize=10, weight="bold")
        axes.set_xlabel("pages in the pool", color=theme.ink)
        axes.set_ylim(-4, 104)
    panels[0].set_ylabel("tokens found, %", color=theme.ink)
    panels[0].legend(frameon=False, labelcolor=theme.ink, loc="upper left")
    return figure
