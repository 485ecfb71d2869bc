"""Two running requests lock their paths; only what no path goes through may be evicted, from its end."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from chapters.figures import PAGE, REQUESTS, Theme, arrow, box, diagram, label, tint

SIZE = 0.46


def node(axes: Axes, theme: Theme, x: float, y: float, holders: list[int], locks: int, right: bool = False) -> None:
    """A run of pages, each with its number of holders; its locks are told at its left or right."""
    locked = locks > 0
    for i, count in enumerate(holders):
        face = tint(theme, PAGE, 0.5) if locked else "none"
        line = {"edgecolor": PAGE, "linewidth": 1.3, "linestyle": "-" if locked else "--"}
        axes.add_patch(Rectangle((x + i * SIZE, y - SIZE), SIZE, SIZE, facecolor=face, **line))
        label(axes, theme, x + (i + 0.5) * SIZE, y - SIZE / 2, str(count), fontsize=9)
    style = {"ha": "left" if right else "right", "fontsize": 9, "color": theme.ink if locked else theme.muted}
    label(axes, theme, x + len(holders) * SIZE + 0.1 if right else x - 0.1, y - SIZE / 2, f"locks = {locks}", **style)


def draw(theme: Theme) -> Figure:
    figure, axes = diagram(8.0, 3.7)
    label(axes, theme, 3.95, 3.5, "root", color=theme.muted, fontsize=9)
    node(axes, theme, 3.5, 3.1, [3, 3], 2)
    node(axes, theme, 2.2, 2.1, [2, 2], 1, right=True)
    node(axes, theme, 5.2, 2.1, [2], 1)
    node(axes, theme, 2.2, 1.1, [1, 1], 0)
    node(axes, theme, 5.2, 1.1, [1, 1, 1], 0)
    arrow(axes, theme, (3.95, 3.4), (3.95, 3.1))
    arrow(axes, theme, (3.7, 3.1 - SIZE), (2.66, 2.1))
    arrow(axes, theme, (4.2, 3.1 - SIZE), (5.43, 2.1))
    arrow(axes, theme, (2.66, 2.1 - SIZE), (2.66, 1.1))
    arrow(axes, theme, (5.43, 2.1 - SIZE), (5.43, 1.1))
    for i, (x, start, end) in enumerate([(0.2, 1.25, 2.2), (6.75, 6.75, 5.2 + SIZE)]):
        box(axes, theme, x, 1.69, 1.05, 0.36, f"request {i + 1}", REQUESTS[i])
        arrow(axes, theme, (start, 1.87), (end, 1.87), REQUESTS[i])
        label(axes, theme, (start + end) / 2, 1.99, "node", fontsize=8.5, color=theme.muted)
    arrow(axes, theme, (3.75, 0.87), (3.2, 0.87))
    arrow(axes, theme, (7.2, 0.87), (6.62, 0.87))
    label(axes, theme, 4.0, 0.87, "first", fontsize=8.5, color=theme.muted)
    label(axes, theme, 7.42, 0.87, "first", fontsize=8.5, color=theme.muted)
    label(
        axes,
        theme,
        4.0,
        0.3,
        "number in a page: its holders (the tree, and each request that reads it) · dashed: evictable, 5 pages",
        color=theme.muted,
        fontsize=9,
    )
    return figure
