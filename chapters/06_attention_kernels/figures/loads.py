"""Grid, block, warp and lane; and which bytes of K one load of a warp touches, step by step."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from chapters.figures import NEW, REQUESTS, K, Theme, box, diagram, label, tint

ROWS, HEIGHT, WIDTH = 8, 0.105, 2.3
STEPS = [
    ("1", "a lane a row: 2 bytes here, 2 there", "two barriers for 128 keys"),
    ("2", "32 neighbours, into shared memory", "three barriers a tile"),
    ("3", "32 neighbours, into registers", "no barrier: a softmax in each warp"),
    ("4", "two whole rows: 16 bytes a lane", "an eighth of the instructions"),
    ("5", "the same, and nobody waits for it", "the next tile travels meanwhile"),
    ("6", "the same, a warp for itself", "and a sequence is cut into splits"),
]


def touched(step: str) -> list[tuple[int, float, float]]:
    """(row, from, to) in shares of a row of 128 16-bit numbers."""
    if step == "1":
        return [(row, 0.0, 0.02) for row in range(ROWS)]
    if step in "23":
        return [(0, 0.0, 0.25)]
    return [(0, 0.0, 1.0), (1, 0.0, 1.0)]


def rows_of_k(axes: Axes, theme: Theme, x: float, y: float, step: str) -> None:
    for row in range(ROWS):
        corner = (x, y - (row + 1) * HEIGHT)
        look = {"facecolor": tint(theme, K, 0.12), "edgecolor": theme.faint, "linewidth": 0.6}
        axes.add_patch(Rectangle(corner, WIDTH, HEIGHT, **look))
    for row, start, end in touched(step):
        corner = (x + start * WIDTH, y - (row + 1) * HEIGHT)
        axes.add_patch(Rectangle(corner, (end - start) * WIDTH, HEIGHT, facecolor=NEW, linewidth=0))


def draw(theme: Theme) -> Figure:
    figure, axes = diagram(8.4, 5.3)
    label(axes, theme, 0.1, 5.05, "a grid of blocks:", ha="left", weight="bold")
    for i in range(7):
        box(axes, theme, 0.1 + i * 0.34, 4.5, 0.28, 0.3, "", NEW if i == 3 else "")
    label(axes, theme, 0.1, 4.3, "one for each sequence and KV head", ha="left", fontsize=8, color=theme.muted)
    label(axes, theme, 2.9, 5.05, "a block: 4 warps", ha="left", weight="bold")
    for i in range(4):
        box(axes, theme, 2.9 + i * 0.62, 4.5, 0.56, 0.3, f"warp {i}", NEW if i == 1 else REQUESTS[5])
    label(
        axes,
        theme,
        2.9,
        4.3,
        "one shared memory; __syncthreads() waits for all",
        ha="left",
        fontsize=8,
        color=theme.muted,
    )
    label(axes, theme, 5.8, 5.05, "a warp: 32 lanes, in step", ha="left", weight="bold")
    for i in range(32):
        corner = (5.8 + i * 0.076, 4.5)
        look = {"facecolor": tint(theme, NEW, 0.5), "edgecolor": theme.paper, "linewidth": 0.5}
        axes.add_patch(Rectangle(corner, 0.076, 0.3, **look))
    label(axes, theme, 5.8, 4.3, "they exchange registers by shuffles", ha="left", fontsize=8, color=theme.muted)
    for i, (step, what, how) in enumerate(STEPS):
        x, y = 0.25 + i % 3 * 2.75, 3.55 - i // 3 * 1.85
        label(axes, theme, x, y + 0.16, f"step {step}", ha="left", weight="bold")
        rows_of_k(axes, theme, x, y, step)
        label(axes, theme, x, y - ROWS * HEIGHT - 0.14, what, ha="left", fontsize=8)
        label(axes, theme, x, y - ROWS * HEIGHT - 0.34, how, ha="left", fontsize=8, color=theme.muted)
    words = "red: bytes of K that one load instruction of a warp asks for; each bar is a row of 128 numbers of 16 bits"
    label(axes, theme, 4.2, 0.12, words, fontsize=8.5, color=theme.muted)
    return figure
