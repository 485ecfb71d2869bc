"""Measured speed by chapter on a CPU: the same chats, answered by each chapter's engine."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.record import load
from chapters.figures import Q, Theme, bar_axes, tint


def draw(theme: Theme) -> Figure:
    chapters = load("ladder")["data"]["chapters"].values()
    names = [f"{chapter['chapter']} · {chapter['title']}" for chapter in chapters]
    speeds = [chapter["tokens_per_s"] for chapter in chapters]

    figure = Figure(figsize=(7.2, 0.85 + 0.34 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.barh(names, speeds, height=0.62, color=tint(theme, Q, 0.75))
    axes.bar_label(bars, [f"{speed:.1f}" for speed in speeds], padding=3, color=theme.ink)
    bar_axes(axes, theme, "output tokens a second")
    axes.margins(x=0.12)
    axes.invert_yaxis()
    return figure
