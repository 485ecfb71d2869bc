"""The decoder as a pipe: the shape of what flows at every joint, in SmolLM2's numbers."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from chapters.figures import NEW, WEIGHTS, K, Q, Theme, V, arrow, box, diagram, label


def draw(theme: Theme) -> Figure:
    figure, axes = diagram(7.2, 6.5)
    pipe(axes, theme)
    layer(axes, theme)
    return figure


def pipe(axes: Axes, theme: Theme) -> None:
    """Left: from ids to the next id, and back."""
    joints = [
        ("token ids", "", "T"),
        ("embedding", WEIGHTS, "T, 576"),
        ("30 layers", WEIGHTS, "T, 576"),
        ("last row, norm", WEIGHTS, "1, 576"),
        ("head", WEIGHTS, "1, 49152"),
        ("sample   01.4", NEW, ""),
    ]
    label(axes, theme, 1.5, 6.3, "the model", weight="bold")
    for i, (name, color, shape) in enumerate(joints):
        y = 5.55 - i * 0.98
        box(axes, theme, 0.75, y, 1.5, 0.42, name, color)
        if shape:
            label(axes, theme, 1.58, y - 0.28, f"[{shape}]", ha="left", color=theme.muted, fontsize=9)
            arrow(axes, theme, (1.5, y), (1.5, y - 0.56))
    x, bottom, top = 0.3, 0.86, 5.76
    axes.plot([0.75, x, x], [bottom, bottom, top], color=NEW, linewidth=1.1)
    arrow(axes, theme, (x - 0.03, top), (0.77, top), NEW)
    label(axes, theme, 0.13, 3.3, "01.5: the new id joins the others, all again", rotation=90, color=NEW, fontsize=9)
    axes.plot([2.25, 3.0], [3.99, 6.1], color=theme.faint, linewidth=1)
    axes.plot([2.25, 3.0], [3.6, 0.2], color=theme.faint, linewidth=1)


def layer(axes: Axes, theme: Theme) -> None:
    """Right: inside one layer. The residual stream runs down the left edge; both halves read it and add to it."""
    label(axes, theme, 5.1, 6.3, "one layer", weight="bold")
    stream, left, right = 3.25, 3.9, 6.9
    middle = (left + right) / 2
    arrow(axes, theme, (stream, 6.1), (stream, 0.1))
    label(axes, theme, stream - 0.12, 5.0, "residual stream [T, 576]", rotation=90, color=theme.muted, fontsize=9)

    def row(y: float, name: str, color: str, shape: str = "") -> None:
        box(axes, theme, left, y, right - left, 0.34, name, color)
        if shape:
            label(axes, theme, middle + 0.08, y - 0.16, f"[{shape}]", ha="left", color=theme.muted, fontsize=9)
            arrow(axes, theme, (middle, y), (middle, y - 0.32))

    def join(y: float) -> None:
        arrow(axes, theme, (left, y), (stream + 0.09, y))
        axes.plot([stream], [y], marker="o", markersize=13, markerfacecolor=theme.paper, markeredgecolor=theme.muted)
        label(axes, theme, stream, y - 0.01, "+")

    arrow(axes, theme, (stream, 5.74), (left, 5.74))
    row(5.57, "RMSNorm   01.1", NEW, "T, 576")
    row(4.91, "q, k, v projections", WEIGHTS)
    width = (right - left - 0.2) / 3
    for i, (name, color, shape) in enumerate([("q", Q, "T, 9, 64"), ("k", K, "T, 3, 64"), ("v", V, "T, 3, 64")]):
        x = left + i * (width + 0.1)
        arrow(axes, theme, (x + width / 2, 4.91), (x + width / 2, 4.62))
        box(axes, theme, x, 4.28, width, 0.34, f"{name} [{shape}]", color)
        arrow(axes, theme, (x + width / 2, 4.28), (x + width / 2, 3.96 if name != "v" else 3.3))
    box(axes, theme, left, 3.62, 2 * width + 0.1, 0.34, "RoPE   01.2", NEW)
    for i in range(2):
        x = left + i * (width + 0.1) + width / 2
        arrow(axes, theme, (x, 3.62), (x, 3.3))
    row(2.96, "causal attention   01.3", NEW, "T, 9, 64")
    row(2.3, "output projection", WEIGHTS)
    join(2.47)
    arrow(axes, theme, (stream, 1.94), (left, 1.94))
    row(1.77, "RMSNorm   01.1", NEW, "T, 576")
    row(1.11, "gate, up:  silu(gate) · up", WEIGHTS, "T, 1536")
    row(0.45, "down projection", WEIGHTS)
    join(0.62)
