"""The life of a request: four states, and what moves it from one to the next."""

from __future__ import annotations

from matplotlib.figure import Figure

from chapters.figures import NEW, REQUESTS, Theme, arrow, box, diagram, label

BLUE, GREEN = REQUESTS[0], REQUESTS[2]


def draw(theme: Theme) -> Figure:
    figure, axes = diagram(7.6, 3.3)
    box(axes, theme, 0.3, 1.5, 1.5, 0.8, "waiting\nno pages, no row")
    box(axes, theme, 3.0, 1.5, 1.6, 0.8, "running\npages, a row", BLUE)
    box(axes, theme, 5.9, 1.5, 1.4, 0.8, "finished\nits answer", GREEN)

    arrow(axes, theme, (1.8, 2.05), (3.0, 2.05), NEW)
    label(axes, theme, 2.4, 2.22, "_admit", color=NEW, fontsize=9)
    arrow(axes, theme, (3.0, 1.72), (1.8, 1.72), NEW)
    label(axes, theme, 2.4, 1.56, "_preempt", color=NEW, fontsize=9)
    label(axes, theme, 2.4, 1.36, "keeps its tokens", color=theme.muted, fontsize=8)
    arrow(axes, theme, (4.6, 1.9), (5.9, 1.9), NEW)
    label(axes, theme, 5.25, 2.07, "retire", color=NEW, fontsize=9)
    label(axes, theme, 5.25, 1.7, "stop, length", color=theme.muted, fontsize=8)

    arrow(axes, theme, (0.9, 3.0), (0.9, 2.3))
    label(axes, theme, 0.98, 2.7, "add", ha="left", fontsize=9)
    axes.plot([3.45, 3.45, 4.15], [2.3, 2.85, 2.85], color=NEW, linewidth=1.1)
    arrow(axes, theme, (4.15, 2.87), (4.15, 2.3), NEW)
    label(axes, theme, 3.8, 3.02, "_continue: planned, in flight, retired", color=NEW, fontsize=9)

    axes.plot([1.05, 1.05, 6.6], [1.5, 0.75, 0.75], color=theme.muted, linewidth=1.1)
    axes.plot([3.8, 3.8], [1.5, 0.75], color=theme.muted, linewidth=1.1)
    arrow(axes, theme, (6.6, 0.73), (6.6, 1.5))
    label(axes, theme, 5.2, 0.9, "abort", fontsize=9)
    note = "aborted while a step is in flight: pages and row go back when that step retires, its token is dropped"
    label(axes, theme, 3.8, 0.35, note, color=theme.muted, fontsize=8)
    return figure
