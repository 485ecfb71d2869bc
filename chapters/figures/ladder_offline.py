"""Measured on a GPU: what each chapter's engine makes of 256 requests at once, beside other engines and the limit."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.record import load
from chapters.figures import NEW, WEIGHTS, Q, Theme, bar_axes, tint


def draw(theme: Theme) -> Figure:
    measured, peers = load("ladder_offline")["data"], load("peers_h200")["data"]
    chapters = [row for name, row in measured["chapters"].items() if name.isdigit()]
    speeds = [row["tokens_per_s"] for row in chapters]
    limit = measured["limit"]["tokens_per_s"]

    figure = Figure(figsize=(7.2, 1.25 + 0.34 * len(chapters)), layout="constrained")
    axes = figure.add_subplot()
    names = [f"{row['chapter']} · {row['title']}" for row in chapters]
    bars = axes.barh(names, speeds, height=0.62, color=tint(theme, Q, 0.75), zorder=2)
    labels = [f"{speed:,.0f}" for speed in speeds]
    inside = [
        speed > 0.4 * limit for speed in speeds
    ]  # where a label behind the bar would cross the other engines' lines
    axes.bar_label(
        bars, ["" if i else text for i, text in zip(inside, labels, strict=True)], padding=3, color=theme.ink
    )
    within = [text if i else "" for i, text in zip(inside, labels, strict=True)]
    axes.bar_label(bars, within, label_type="center", color=theme.ink)

    *slower, best = sorted((peer["tokens_per_s"]["offline"], name) for name, peer in peers["peers"].items())
    marks = [(*peer, NEW, level, "right") for level, peer in enumerate(slower)]  # a line ends below the next label
    marks += [(*best, NEW, 0, "left"), (limit, "what the memory allows", WEIGHTS, 1, "right")]
    bottom, gap = len(chapters) - 0.5, 0.01 * limit
    for speed, name, color, level, side in marks:
        height = -0.75 - 0.6 * level
        axes.plot([speed, speed], [bottom, height - 0.2], color=color, linewidth=1.1, linestyle="--", zorder=3)
        x = speed + (gap if side == "left" else -gap)
        axes.text(x, height, f"{name} {speed:,.0f}", ha=side, va="center", color=color, fontsize=8.5)
    axes.set_ylim(bottom, -0.9 - 0.6 * len(slower))  # the first chapter on top
    axes.set_xlim(0, 1.04 * limit)
    bar_axes(axes, theme, "output tokens a second")
    return figure
