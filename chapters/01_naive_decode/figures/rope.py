"""RoPE: which elements of a head form a pair, and how far each pair turns at positions 0 to 3."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Arc, Circle

from chapters.figures import REQUESTS, Theme, arrow, cells, diagram, label

HEAD_DIM = 8
THETA = 20.0  # small, so that the slow pairs can be seen to move
PAIR_COLORS = REQUESTS[:4]


def draw(theme: Theme) -> Figure:
    figure, axes = diagram(7.2, 4.1)
    head(axes, theme)
    for pair in range(HEAD_DIM // 2):
        dial(axes, theme, pair, x=0.95 + pair * 1.77, y=1.05)
    return figure


def head(axes: Axes, theme: Theme) -> None:
    size, left, top = 0.52, 1.52, 2.85
    label(axes, theme, left - 0.15, top - size / 2, "one head", ha="right", color=theme.muted)
    for i in range(HEAD_DIM):
        color = PAIR_COLORS[i % (HEAD_DIM // 2)]
        cells(axes, theme, left + i * size, top, [[color]], size)
        label(axes, theme, left + (i + 0.5) * size, top - size / 2, f"x{i}")
    for pair, color in enumerate(PAIR_COLORS):
        centre = left + (pair + 0.5 + HEAD_DIM / 4) * size
        height = 0.7 + 0.35 * pair
        axes.add_patch(
            Arc((centre, top), HEAD_DIM / 2 * size, height, theta1=0, theta2=180, color=color, linewidth=1.4)
        )
    label(axes, theme, 3.6, 4.0, f"pair i = (x[i], x[i + {HEAD_DIM // 2}])", va="top")


def dial(axes: Axes, theme: Theme, pair: int, x: float, y: float) -> None:
    radius, color = 0.62, PAIR_COLORS[pair]
    axes.add_patch(Circle((x, y), radius, facecolor="none", edgecolor=theme.faint))
    step = THETA ** (-2 * pair / HEAD_DIM)
    for position in range(4):
        angle = 0.3 + position * step
        tip = (x + radius * np.cos(angle), y + radius * np.sin(angle))
        arrow(axes, theme, (x, y), tip, color)
        if step > 0.15 or position in (0, 3):  # the slow pair has no room for four numbers
            label(axes, theme, x + 0.76 * np.cos(angle), y + 0.76 * np.sin(angle), str(position), fontsize=8)
    label(axes, theme, x, 0.12, f"pair {pair}: {np.degrees(step):.0f}° a position", color=theme.muted, fontsize=9)
