"""Recorded: one decode step of 16 requests on the GPU and on the host, before this chapter and after."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.idle import WAITS
from benchmarks.record import load
from chapters.figures import NEW, PAGE, REQUESTS, Theme, tint

BATCH = "16"
TITLES = {"7": "chapter 7: kernel by kernel", "8": "chapter 8: from a graph, with a step in flight"}
APART = 1e-3  # of the width: spans that are closer are drawn as one, and shorter ones are drawn so long


def merged(spans: list[tuple[float, float]], apart: float) -> Iterator[tuple[float, float]]:
    """Spans (start, length) in order, with those joined that are less than `apart` from each other."""
    start, end = -1.0, -1.0
    for begin, length in sorted(spans):
        if end >= 0 and begin - end > apart:
            yield start, end - start
        if end < 0 or begin - end > apart:
            start, end = begin, begin
        end = max(end, begin + length)
    if end >= 0:
        yield start, end - start


def columns(rows: dict[str, list[Any]], waits: bool | None = None) -> list[tuple[float, float]]:
    """Start and length in milliseconds; of the host's calls those that wait, or those that do not."""
    each = zip(rows["name"], rows["start_us"], rows["us"], strict=True)
    return [(a / 1000, us / 1000) for name, a, us in each if waits is None or bool(WAITS.search(name)) == waits]


def lane(axes: Axes, theme: Theme, y: float, spans: list[tuple[float, float]], width: float, color: str) -> None:
    bars = [(start, max(length, APART * width)) for start, length in merged(spans, APART * width)]
    axes.broken_barh(bars, (y - 0.3, 0.6), facecolors=tint(theme, color, 0.85), linewidth=0)


def draw(theme: Theme) -> Figure:
    steps = {chapter: rows[BATCH] for chapter, rows in load("ch08_timeline")["data"]["chapters"].items()}
    ends = [max(start + us for start, us in columns(step["kernels"])) for step in steps.values()]
    width = 1.02 * max(*ends, *(step["host_step_us"] / 1000 for step in steps.values()))
    figure = Figure(figsize=(7.4, 3.3), layout="constrained")
    for axes, (chapter, step) in zip(figure.subplots(2, 1, sharex=True), steps.items(), strict=True):
        axes.patch.set_alpha(0)
        host = step["host_step_us"] / 1000
        axes.broken_barh([(0, host)], (0.7, 0.6), facecolors=tint(theme, PAGE, 0.55), linewidth=0)
        lane(axes, theme, 1, columns(step["calls"], waits=False), width, NEW)
        lane(axes, theme, 1, columns(step["calls"], waits=True), width, theme.faint)
        lane(axes, theme, 0, columns(step["kernels"]), width, REQUESTS[0])
        axes.set_yticks([1, 0], ["host", "GPU"])
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(theme.muted)
        axes.tick_params(colors=theme.muted, labelcolor=theme.ink)
        axes.tick_params(axis="y", length=0)
        axes.set(xlim=(0, width), ylim=(-0.5, 1.5))
        count = len(step["kernels"]["name"])
        text = f"{TITLES.get(chapter, chapter)}: {count} kernels, {step['idle_share']:.0%} of the time idle"
        axes.set_title(text, loc="left", color=theme.ink, fontsize=10)
    axes.set_xlabel("milliseconds from the step's start on the host", color=theme.ink)
    names = {"in a call of CUDA": NEW, "in Python": PAGE, "waiting": theme.faint, "in a kernel": REQUESTS[0]}
    handles = [axes.barh(0, 0, color=tint(theme, color, 0.55 if color == PAGE else 0.85), label=name)
               for name, color in names.items()]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, labelcolor=theme.ink, fontsize=8)
    return figure
