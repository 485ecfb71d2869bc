"""Measured: a decode step by batch, launched kernel by kernel, from a graph, with a step in flight, and with both."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.record import load
from chapters.figures import NEW, PAGE, REQUESTS, Theme, V, chart, legend

LOOK = {
    "eager": ("kernel by kernel", NEW, "-"),
    "overlap": ("with a step in flight", REQUESTS[1], "-"),
    "graph": ("from a graph", V, "-"),
    "graph and overlap": ("from a graph, with a step in flight", REQUESTS[0], "-"),
}


def draw(theme: Theme) -> Figure:
    ways = load("ch08_steps")["data"]["ways"]
    figure, axes = chart(theme, "requests in the step", "milliseconds of a decode step")
    for way, (name, color, line) in LOOK.items():
        rows = ways[way].values()
        batches = [row["batch"] for row in rows]
        axes.plot(batches, [row["step_ms"] for row in rows], line, marker="o", markersize=4, color=color, label=name)
    busy = [(row["batch"], row["idle"]["kernel_ms"]) for row in ways["graph and overlap"].values() if row.get("idle")]
    if busy:
        axes.plot(*zip(*busy, strict=True), color=PAGE, linestyle=(0, (3, 2)), label="its kernels alone")
    axes.set(xscale="log", yscale="log")
    axes.minorticks_off()
    axes.set_xticks(batches, [str(batch) for batch in batches])
    ticks = [0.5, 1, 2, 5, 10, 20]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    legend(axes, theme, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return figure
