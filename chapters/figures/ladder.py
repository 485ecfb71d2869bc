"""Measured speed by chapter, and the work behind it: the same chats, answered by each chapter's engine."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.record import load
from chapters.figures import PAGE, WEIGHTS, Q, Theme, tint


def draw(theme: Theme) -> Figure:
    chapters = load("ladder")["data"]["chapters"].values()
    names = [f"{chapter['chapter']} · {chapter['title']}" for chapter in chapters]
    panels = [
        ("tokens a second", [chapter["tokens_per_s"] for chapter in chapters], Q),
        ("rows for a token", [chapter["per_output_token"]["tokens_computed"] for chapter in chapters], PAGE),
        ("steps for a token", [chapter["per_output_token"]["steps"] for chapter in chapters], WEIGHTS),
    ]
    figure = Figure(figsize=(7.2, 0.5 + 0.34 * len(names)), layout="constrained")
    for axes, (title, values, color) in zip(figure.subplots(1, 3, sharey=True), panels, strict=True):
        bars = axes.barh(names, values, height=0.62, color=tint(theme, color, 0.75))
        axes.bar_label(bars, [_short(value) for value in values], padding=3, color=theme.ink, fontsize=9)
        axes.set_title(title, fontsize=9.5, color=theme.ink, loc="left")
        axes.patch.set_alpha(0)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.spines["left"].set_color(theme.muted)
        axes.tick_params(length=0, labelcolor=theme.ink, labelbottom=False)
        axes.margins(x=0.3)
    axes.invert_yaxis()
    return figure


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}".rstrip("0").rstrip(".")
