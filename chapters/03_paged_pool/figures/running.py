"""Counted: requests that run side by side, step by step, in the same memory, by regions and by pages."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.record import load
from chapters.figures import NEW, PAGE, Theme, chart, legend, tint


def draw(theme: Theme) -> Figure:
    fit = load("ch03_memory")["data"]["fit"]
    figure, axes = chart(theme, "step", "requests in the step", height=3.0)
    for key, name, color in [
        (str(fit["context"]), f"regions of {fit['context']:,} tokens", NEW),
        ("16", "pages of 16 tokens", PAGE),
    ]:
        running = fit["page_size"][key]["running"]
        axes.fill_between(range(len(running)), running, step="post", color=tint(theme, color, 0.3), linewidth=0)
        axes.step(range(len(running)), running, where="post", color=color, linewidth=1.4, label=name)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    legend(axes, theme, loc="upper right")
    return figure
