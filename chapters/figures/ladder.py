"""Measured speed by chapter on a CPU: the same chats, answered by each chapter's engine."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.record import load
from chapters.figures import Q, Theme, tint


def draw(theme: Theme) -> Figure:
    chapters = load("ladder")["data"]["chapters"].values()
    names = [f"{chapter['chapter']} · {chapter['title']}" for chapter in chapters]
    speeds = [chapter["tokens_per_s"] for chapter in chapters]

    figure = Figure(figsize=(7.2, 0.85 + 0.34 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.barh(names, speeds, height=0.62, color=tint(theme, Q, 0.75))
    axes.bar_label(bars, [f"{speed:.1f}" for speed in speeds], padding=3, color=theme.ink)
    axes.set_xlabel("output tokens a second", color=theme.ink)
    axes.patch.set_alpha(0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(theme.muted)
    axes.tick_params(axis="y", length=0, labelcolor=theme.ink)
    axes.tick_params(axis="x", color=theme.muted, labelcolor=theme.muted)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    return figure
