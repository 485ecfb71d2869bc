"""A layer's MLP over two ranks: the first matrix cut by columns, the second by rows, and the one sum behind them."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from chapters.figures import NEW, PAGE, REQUESTS, Theme, arrow, box, diagram, label, tint

HIDDEN, INNER, TOKENS = 0.62, 1.24, 0.22  # inches of each dimension


def matrix(axes: Axes, theme: Theme, x: float, y: float, width: float, height: float, color: str = "") -> None:
    fill = tint(theme, color, 0.55) if color else "none"
    edge = color or theme.faint
    axes.add_patch(Rectangle((x, y), width, height, facecolor=fill, edgecolor=edge, linewidth=0.9))


def lane(axes: Axes, theme: Theme, y: float, rank: int) -> None:
    """One rank's way through the MLP, around the height y."""
    color, other = REQUESTS[rank], 1 - rank
    sign = {"fontsize": 11, "color": theme.muted}
    label(axes, theme, 0.08, y, f"rank {rank}", ha="left", weight="bold", fontsize=9.5)
    matrix(axes, theme, 0.78, y - TOKENS / 2, HIDDEN, TOKENS, PAGE)
    label(axes, theme, 1.53, y, "×", **sign)
    matrix(axes, theme, 1.66 + other * INNER / 2, y - HIDDEN / 2, INNER / 2, HIDDEN)
    matrix(axes, theme, 1.66 + rank * INNER / 2, y - HIDDEN / 2, INNER / 2, HIDDEN, color)
    label(axes, theme, 3.03, y, "→", **sign)
    matrix(axes, theme, 3.16 + other * INNER / 2, y - TOKENS / 2, INNER / 2, TOKENS)
    matrix(axes, theme, 3.16 + rank * INNER / 2, y - TOKENS / 2, INNER / 2, TOKENS, color)
    label(axes, theme, 4.53, y, "×", **sign)
    top = y if rank == 0 else y - INNER / 2
    matrix(axes, theme, 4.66, y - INNER / 2 if rank == 0 else y, HIDDEN, INNER / 2)
    matrix(axes, theme, 4.66, top, HIDDEN, INNER / 2, color)
    label(axes, theme, 5.42, y, "=", **sign)
    matrix(axes, theme, 5.55, y - TOKENS / 2, HIDDEN, TOKENS, color)


def draw(theme: Theme) -> Figure:
    figure, axes = diagram(8.0, 4.1)
    heights = (2.75, 1.15)
    for rank, y in enumerate(heights):
        lane(axes, theme, y, rank)
    small = {"fontsize": 8.5, "color": theme.muted}
    for x, text in (
        (0.78 + HIDDEN / 2, "x: the same\non all ranks"),
        (1.66 + INNER / 2, "gate and up\ncut by columns"),
        (3.16 + INNER / 2, "its features, through\nSiLU and product"),
        (4.66 + HIDDEN / 2, "down\ncut by rows"),
        (5.55 + HIDDEN / 2, "a part of\nevery sum"),
    ):
        label(axes, theme, x, 3.72, text, **small)
    middle = sum(heights) / 2
    box(axes, theme, 6.42, middle - 0.3, 0.85, 0.6, "all-\nreduce", NEW)
    for y in heights:
        side = 1 if y > middle else -1
        arrow(axes, theme, (5.55 + HIDDEN, y), (6.62, middle + 0.3 * side), NEW)
        arrow(axes, theme, (7.08, middle + 0.3 * side), (7.42, y - 0.12 * side), NEW)
        matrix(axes, theme, 7.25, y - TOKENS / 2, HIDDEN, TOKENS, PAGE)
    label(axes, theme, 7.25 + HIDDEN / 2, 3.72, "y: the same\non all ranks", **small)
    note = "in attention the same: Q, K and V by heads, then the output projection. Nothing is sent before the sum"
    label(axes, theme, 4.0, 0.17, note, color=theme.muted, fontsize=9)
    return figure
