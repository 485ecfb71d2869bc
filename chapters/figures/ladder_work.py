"""The work behind the speed, which no machine changes: rows and steps for each token of an answer, by chapter."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.record import load
from chapters.figures import PAGE, WEIGHTS, Theme, tint


def draw(theme: Theme) -> Figure:
    chapters = load("ladder")["data"]["chapters"].values()
    names = [f"{chapter['chapter']} · {chapter['title']}" for chapter in chapters]
    panels = [
        ("rows for a token", "tokens_computed", PAGE),
        ("steps for a token", "steps", WEIGHTS),
    ]
    figure = Figure(figsize=(7.2, 0.5 + 0.34 * len(names)), layout="constrained")
    for axes, (title, count, color) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        values = [chapter["per_output_token"][count] for chapter in chapters]
        bars = axes.barh(names, values, height=0.62, color=tint(theme, color, 0.75))
        axes.bar_label(bars, [_short(value) for value in values], padding=3, color=theme.ink)
        axes.set_title(title, fontsize=10, color=theme.ink, loc="left")
        axes.patch.set_alpha(0)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.spines["left"].set_color(theme.muted)
        axes.tick_params(length=0, labelcolor=theme.ink, labelbottom=False)
        axes.margins(x=0.2)
    axes.invert_yaxis()
    return figure


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}".rstrip("0").rstrip(".")
