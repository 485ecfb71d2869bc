"""Measured: the six steps in CUDA C++, as shares of what a copy reaches."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.record import load
from chapters.figures import NEW, K, Theme, chart, label, tint

NAMES = {
    1: "one thread a score",
    2: "tiles in shared memory",
    3: "a softmax in each warp",
    4: "16 bytes a load",
    5: "two buffers",
    6: "a warp for itself, splits",
}


def draw(theme: Theme) -> Figure:
    rows = load("ch06_attention")["data"]["cuda_ladder"]
    figure, axes = chart(theme, "share of the copy's bandwidth, in per cent", "", height=2.9)
    for y, row in enumerate(rows):
        share = 100 * row["fraction"]
        axes.barh(y, share, color=tint(theme, K, 0.8), height=0.62)
        words, inside = f"{share:.0f} %, {row['us']:,.0f} µs", share > 60
        label(axes, theme, share - 1 if inside else share + 1, y, words, ha="right" if inside else "left", fontsize=8)
    axes.set_yticks(range(len(rows)), [f"{row['step']}  {NAMES[row['step']]}" for row in rows])
    axes.axvline(100, color=NEW, linewidth=1.1, linestyle="--")
    axes.invert_yaxis()
    axes.set_xlim(0, 110)
    axes.grid(visible=False, axis="y")
    return figure
