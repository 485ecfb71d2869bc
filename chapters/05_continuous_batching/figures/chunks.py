"""By the clock: tokens per second and the longest gap between two tokens, as the budget of a step grows."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.record import load
from chapters.figures import NEW, REQUESTS, Theme, chart


def draw(theme: Theme) -> Figure:
    curve = load("ch05_batching")["data"]["chunks"]
    budgets = [point["budget"] for point in curve]
    figure, axes = chart(theme, "budget of a step, in tokens", "tokens per second")
    axes.plot(budgets, [point["tokens_per_s"] for point in curve], marker="o", color=REQUESTS[0])
    axes.set_xscale("log", base=2)
    axes.set_xticks(budgets, [str(b) for b in budgets])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.yaxis.label.set_color(REQUESTS[0])
    gaps = axes.twinx()
    gaps.plot(budgets, [point["worst_gap_ms"] for point in curve], marker="s", color=NEW)
    gaps.set_ylim(bottom=0)
    gaps.set_ylabel("longest gap between two tokens, ms", color=NEW)
    gaps.spines[["top", "left", "bottom"]].set_visible(False)
    gaps.spines["right"].set_color(theme.muted)
    gaps.tick_params(colors=theme.muted, labelcolor=theme.ink)
    return figure
