"""A norm in front of a tiled product: squares add up beside the product, and the row's factor comes last."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from chapters.figures import NEW, WEIGHTS, Q, Theme, V, arrow, box, diagram, label, tint

TILES, NOW = 4, 1
CELL = 0.55


def draw(theme: Theme) -> Figure:
    figure, axes = diagram(7.6, 3.5)
    top, left = 2.55, 0.55
    for i in range(TILES):
        seen = i <= NOW
        look = {"edgecolor": theme.muted, "linewidth": 0.8}
        for y, height, color in ((top, 0.5, Q), (top - 0.28, 0.18, V)):
            fill = tint(theme, NEW if i == NOW and color == Q else color, 0.75 if i == NOW else 0.35 if seen else 0.12)
            axes.add_patch(Rectangle((left + i * CELL, y), CELL, height, facecolor=fill, **look))
    label(axes, theme, left - 0.08, top + 0.25, "x", ha="right", weight="bold")
    label(axes, theme, left - 0.08, top - 0.19, "w", ha="right", weight="bold")
    label(axes, theme, left + TILES * CELL / 2, top + 0.68, "some rows, tile by tile →", fontsize=9, color=theme.muted)
    for i in range(TILES):
        fill = tint(theme, WEIGHTS, 0.75 if i == NOW else 0.35 if i < NOW else 0.12)
        corner = (3.35, 3.05 - (i + 1) * 0.42)
        axes.add_patch(Rectangle(corner, 0.9, 0.42, facecolor=fill, edgecolor=theme.muted, linewidth=0.8))
    label(axes, theme, 3.8, 3.22, "weightᵀ ↓", fontsize=9, color=theme.muted)

    box(axes, theme, 0.55, 1.2, 2.2, 0.62, "squares += Σ value²\none number a row", NEW)
    box(axes, theme, 3.0, 0.45, 1.9, 0.62, "product +=\n(value · w) · tile", WEIGHTS)
    x = left + (NOW + 0.5) * CELL
    arrow(axes, theme, (x, top - 0.28), (x, 1.82), NEW)
    arrow(axes, theme, (2.75, 2.35), (3.35, 2.35))
    arrow(axes, theme, (3.8, 1.37), (3.8, 1.07), WEIGHTS)
    box(axes, theme, 5.45, 1.35, 1.85, 0.95, "after the loop\nproduct ·\nrsqrt(squares / n + ε)", Q)
    arrow(axes, theme, (4.9, 0.8), (6.0, 1.35), WEIGHTS)
    axes.plot([1.65, 1.65, 5.1], [1.2, 0.22, 0.22], color=NEW, linewidth=1.1)
    axes.plot([5.1, 6.75], [0.22, 0.22], color=NEW, linewidth=1.1)
    arrow(axes, theme, (6.75, 0.2), (6.75, 1.35), NEW)
    arrow(axes, theme, (6.4, 2.3), (6.4, 2.65))
    label(axes, theme, 6.4, 2.8, "activation, store", fontsize=9)
    return figure
