"""Which heads each rank holds, as the engine cuts them: where KV heads divide, and where some are held twice."""

from __future__ import annotations

from collections import Counter

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from chapters.figures import NEW, K, Q, Theme, diagram, label, tint
from minisgl.distributed.comm import Alone
from minisgl.layers.shard import kv_heads_of

CELL, HEIGHT, GAP = 0.44, 0.36, 0.26


class Member(Alone):
    """A rank that talks to nobody."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size  # type: ignore[misc]


def cell(axes: Axes, theme: Theme, x: float, y: float, width: float, text: str, color: str, again: bool) -> None:
    look = {"edgecolor": NEW if again else theme.muted, "linewidth": 1.8 if again else 0.7}
    inset = 0.025
    corner = (x + inset, y + inset)
    shape = Rectangle(corner, width - 2 * inset, HEIGHT - 2 * inset, facecolor=tint(theme, color, 0.5), **look)
    axes.add_patch(shape)
    label(axes, theme, x + width / 2, y + HEIGHT / 2 - 0.01, text, fontsize=9)


def heads(axes: Axes, theme: Theme, y: float, title: str, num_heads: int, num_kv_heads: int, size: int) -> None:
    label(axes, theme, 0.15, y + 1.22, title, ha="left", weight="bold", fontsize=9.5)
    label(axes, theme, 1.0, y + 0.4 + HEIGHT / 2, "query heads", ha="right", fontsize=9)
    label(axes, theme, 1.0, y + HEIGHT / 2, "KV heads", ha="right", fontsize=9)
    held = [kv_heads_of(num_heads, num_kv_heads, Member(rank, size)) for rank in range(size)]
    copies = Counter(head for each in held for head in each)
    local = num_heads // size
    for rank, kv_heads in enumerate(held):
        x = 1.15 + rank * (local * CELL + GAP)
        label(axes, theme, x + local * CELL / 2, y + 0.92, f"rank {rank}", fontsize=9, color=theme.muted)
        for i in range(local):
            cell(axes, theme, x + i * CELL, y + 0.4, CELL, str(rank * local + i), Q, False)
        width = local * CELL / len(kv_heads)
        for i, head in enumerate(kv_heads):
            cell(axes, theme, x + i * width, y, width, str(head), K, copies[head] > 1)


def draw(theme: Theme) -> Figure:
    figure, axes = diagram(7.2, 3.55)
    heads(axes, theme, 2.1, "SmolLM2-135M on 3 ranks: 9 query heads, 3 KV heads", 9, 3, 3)
    heads(axes, theme, 0.45, "12 query heads, 3 KV heads, on 2 ranks", 12, 3, 2)
    note = "under its query heads stands the KV head that they read; outlined: held more than once"
    label(axes, theme, 3.6, 0.17, note, color=theme.muted, fontsize=9)
    return figure
