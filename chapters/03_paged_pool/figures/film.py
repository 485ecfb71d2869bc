"""Three steps of a run of the engine, from its trace: pages in the colours of the requests that hold them."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.record import RESULTS
from chapters.draw import pool_grid, read_trace
from chapters.figures import Theme


def draw(theme: Theme) -> Figure:
    trace = read_trace(RESULTS / "ch03_film.jsonl")
    second = next(i for i, step in enumerate(trace.steps) if i and not step.tables) + 1  # the second group's first step
    figure = Figure(figsize=(8.2, 2.9))
    for i, step in enumerate([0, second // 2, second]):
        axes = figure.add_axes((0.01 + 0.335 * i, 0.02, 0.31, 0.84))
        pool_grid(trace, step, axes, theme, columns=8, key=False)
        now = trace.steps[step]
        words = f"step {step}: {len(now.tables)} requests, {now.free} pages free"
        axes.set_title(words, fontsize=9, color=theme.ink)
    return figure
