"""Measured: a decode step by chapter, the kernels' own time inside it, and how many kernels there are."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.record import load
from chapters.figures import NEW, PAGE, Theme, chart, legend, tint


def draw(theme: Theme) -> Figure:
    profiles = load("ch07_fused")["data"]["profile"]
    figure, axes = chart(theme, "milliseconds of a decode step", "", height=2.5)
    for y, entry in enumerate(profiles):
        first = y == 0
        idle = "the GPU has nothing to do" if first else None
        axes.barh(y, entry["step_ms"], color=tint(theme, PAGE, 0.35), height=0.6, label=idle)
        axes.barh(y, entry["gpu_ms"], color=tint(theme, NEW, 0.85), height=0.6, label="in kernels" if first else None)
        text = f" {entry['kernels_per_step']:,.0f} kernels"
        axes.text(entry["step_ms"], y, text, va="center", color=theme.ink, fontsize=9)
    axes.set_yticks(range(len(profiles)), [f"chapter {entry['chapter']}" for entry in profiles])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(entry["step_ms"] for entry in profiles))
    axes.grid(visible=False, axis="y")
    legend(axes, theme, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=8)
    return figure
