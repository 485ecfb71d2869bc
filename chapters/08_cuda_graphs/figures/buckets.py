"""Rows of padding by batch, for the engine's buckets and for powers of two."""

from __future__ import annotations

from matplotlib.figure import Figure

from chapters.figures import NEW, REQUESTS, Theme, chart, legend
from minisgl.engine.graph import bucket_for, buckets

MOST = 256


def draw(theme: Theme) -> Figure:
    ways = {"powers of two": ([2**i for i in range(9)], NEW), "the engine's": (buckets(MOST), REQUESTS[0])}
    batches = range(1, MOST + 1)
    figure, axes = chart(theme, "requests in the step", "padding, per cent of the rows", height=3.0)
    for name, (sizes, color) in ways.items():
        waste = [100 * (1 - n / bucket_for(n, sizes)) for n in batches]
        mean = sum(waste) / len(waste)
        text = f"{name}: {len(sizes)} graphs, {mean:.0f} % on average"
        axes.plot(batches, waste, color=color, linewidth=1.1, label=text)
    axes.set(xlim=(0, MOST), ylim=(0, 55))
    axes.set_xticks(range(0, MOST + 1, 32))
    legend(axes, theme, loc="upper right", fontsize=9)
    return figure
