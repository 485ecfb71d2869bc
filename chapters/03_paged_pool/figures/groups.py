"""The rows of one step, and the three gathers that they become: two decodes, one decode, one chunk."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from chapters.figures import NEW, REQUESTS, Theme, arrow, diagram, label, tint

SIZE = 0.22
STEP = [("A", 1, 7), ("B", 3, 6), ("C", 1, 12), ("D", 1, 4)]  # name, new, total
GROUPS = [("decodes of 4 … 7 tokens", [0, 3]), ("a chunk, alone", [1]), ("decodes of 8 … 15 tokens", [2])]


def draw(theme: Theme) -> Figure:
    figure, axes = diagram(8.2, 4.1)
    label(axes, theme, 1.2, 3.85, "one step: 6 rows of q", weight="bold")
    row = 0
    rows: dict[int, list[float]] = {}
    for i, (name, new, total) in enumerate(STEP):
        for t in range(new):
            y = 3.45 - row * 0.42
            corner = (0.75, y - SIZE)
            axes.add_patch(Rectangle(corner, 0.5, SIZE, facecolor=tint(theme, REQUESTS[i], 0.75), edgecolor="none"))
            label(axes, theme, 0.62, y - SIZE / 2, str(row), color=theme.muted, fontsize=8, ha="right")
            words = f"{name}, position {total - new + t}"
            label(axes, theme, 1.33, y - SIZE / 2, words, ha="left", fontsize=9)
            rows.setdefault(i, []).append(y - SIZE / 2)
            row += 1
    left = 4.25
    y = 3.55
    for title, members in GROUPS:
        label(axes, theme, left, y + 0.2, title, ha="left", weight="bold")
        width = max(STEP[i][2] for i in members)
        for i in members:
            _, new, total = STEP[i]
            for t in range(new):
                bar(axes, theme, left, y, i, total - new + t + 1, total, width)
                arrow(axes, theme, (2.7, rows[i][t]), (left - 0.05, y - SIZE / 2), REQUESTS[i])
                y -= SIZE + 0.06
        y -= 0.62
    words = "number: the token whose slot is gathered · filled: read · outlined: masked · red: padding"
    label(axes, theme, 4.1, 0.18, words, color=theme.muted, fontsize=9)
    return figure


def bar(axes: Axes, theme: Theme, x: float, y: float, i: int, seen: int, total: int, width: int) -> None:
    """One query's view of the gathered slots."""
    for s in range(width):
        color = REQUESTS[i] if s < total else NEW
        fill = tint(theme, color, 0.75) if s < seen else "none"
        corner = (x + s * SIZE, y - SIZE)
        axes.add_patch(Rectangle(corner, SIZE, SIZE, facecolor=fill, edgecolor=color, linewidth=0.8))
        label(axes, theme, corner[0] + SIZE / 2, y - SIZE / 2, str(min(s, total - 1)), fontsize=7)
