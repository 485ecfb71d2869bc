"""The causal triangle three times: recomputed at every step, as one prefill, as one decode row."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from chapters.figures import NEW, Theme, cells, diagram, label, tint

PROMPT, TOTAL, SIZE = 5, 8, 0.26


def triangle(axes: Axes, theme: Theme, x: float, y: float, rows: int, first_new: int) -> None:
    """Row t may see columns 0 … t; rows before first_new were computed by an earlier step."""
    before = theme.muted
    grid = [
        [(NEW if t >= first_new else before) if s <= t and t < rows else "" for s in range(TOTAL)] for t in range(TOTAL)
    ]
    cells(axes, theme, x, y, grid, SIZE)


def draw(theme: Theme) -> Figure:
    figure, axes = diagram(8.2, 3.55)
    top = 2.75
    panels = [
        ("chapter 1, every step", "all 8 rows again", TOTAL, 0),
        ("chapter 2, prefill", "a block: 5 rows at once", PROMPT, 0),
        ("chapter 2, third decode", "one row; 7 K and V are read", TOTAL, TOTAL - 1),
    ]
    for i, (title, note, rows, first_new) in enumerate(panels):
        x = 0.55 + i * 2.65
        middle = x + TOTAL * SIZE / 2
        triangle(axes, theme, x, top, rows, first_new)
        label(axes, theme, middle, top + 0.52, title, weight="bold")
        label(axes, theme, middle, top + 0.2, "key 0 … 7", color=theme.muted, fontsize=8)
        label(axes, theme, middle, top - TOTAL * SIZE - 0.2, note)
    label(axes, theme, 0.36, top - TOTAL * SIZE / 2, "query 7 … 0", color=theme.muted, fontsize=8, rotation=90)
    legend = [(tint(theme, NEW, 0.75), "computed in this step"), (tint(theme, theme.muted, 0.75), "computed before")]
    for i, (fill, text) in enumerate(legend):
        x = 2.35 + 2.1 * i
        axes.plot([x], [0.14], marker="s", markersize=8, color=fill)
        label(axes, theme, x + 0.16, 0.14, text, ha="left", fontsize=9)
    return figure
