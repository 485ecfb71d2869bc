"""The engine that the course builds: each part with its chapter; parts that exist are solid."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch

from chapters.figures import NEW, PAGE, REQUESTS, WEIGHTS, K, Q, Theme, V, arrow, cells, diagram, label, tint

BUILT = {int(folder.parent.name[:2]) for folder in Path(__file__).parents[1].glob("[0-9][0-9]_*/chapter.yml")}


def draw(theme: Theme) -> Figure:
    figure, ax = diagram(7.2, 4.45)

    part(ax, theme, 2.05, 1.02, 3.95, 2.98, "decode step, one replay", 8, PAGE, top=True)
    part(ax, theme, 2.2, 1.17, 3.65, 2.4, "decoder layers, on one GPU or several", 9, WEIGHTS, top=True)
    part(ax, theme, 2.4, 2.3, 1.5, 0.72, "decoder", 1, Q)
    part(ax, theme, 4.15, 2.3, 1.5, 0.72, "fused ops", 7, WEIGHTS)
    part(ax, theme, 2.4, 1.35, 1.5, 0.72, "KV cache", 2, K)
    part(ax, theme, 4.15, 1.35, 1.5, 0.72, "attention kernels", 6, K)

    part(ax, theme, 0.1, 3.28, 1.5, 0.72, "server", 10, V)
    part(ax, theme, 0.1, 2.3, 1.5, 0.72, "scheduler", 5, NEW)
    part(ax, theme, 0.1, 1.35, 1.5, 0.72, "radix tree", 4, PAGE)
    part(ax, theme, 6.2, 2.3, 0.9, 0.72, "sampler", 1, V)

    arrow(ax, theme, (0.85, 3.28), (0.85, 3.02))
    arrow(ax, theme, (0.85, 2.3), (0.85, 2.07))
    arrow(ax, theme, (1.6, 2.66), (2.05, 2.66))
    arrow(ax, theme, (6.0, 2.66), (6.2, 2.66))
    ax.plot([6.65, 6.65, 1.82, 1.82], [3.02, 4.17, 4.17, 2.88], color=theme.muted, linewidth=1.1)
    arrow(ax, theme, (1.84, 2.88), (1.6, 2.88))
    label(ax, theme, 4.0, 4.3, "one new token a request, each step", fontsize=9, color=theme.muted)

    a, b, c = REQUESTS[:3]
    owners = [a, a, b, a, "", c, c, b, b, "", "", a, c, "", b, b, "", c, a, a, "", "", c, "", b, b, "", ""]
    cells(ax, theme, 0.1, 0.84, [owners], size=0.25)
    arrow(ax, theme, (0.85, 1.35), (0.85, 0.84))
    arrow(ax, theme, (3.15, 1.35), (3.15, 0.84))
    label(
        ax,
        theme,
        0.1,
        0.38,
        "the pool of pages: each colour is a request, a shared prefix is stored once",
        ha="left",
        fontsize=9,
    )
    badge(ax, theme, 6.97, 0.38, 3, PAGE)
    return figure


def part(
    ax: Axes, theme: Theme, x: float, y: float, width: float, height: float, name: str, chapter: int, color: str,
    top: bool = False,
) -> None:  # fmt: skip
    built = chapter in BUILT
    shape = FancyBboxPatch(
        (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.08",
        facecolor=tint(theme, color, 0.25) if built else theme.paper, edgecolor=color,
        linestyle="-" if built else (0, (4, 3)), linewidth=1.3,
    )  # fmt: skip
    ax.add_patch(shape)
    ink = theme.ink if built else theme.muted
    if top:
        label(ax, theme, x + 0.15, y + height - 0.22, name, ha="left", color=ink, fontsize=9)
        badge(ax, theme, x + width - 0.22, y + height - 0.22, chapter, color)
    else:
        label(ax, theme, x + width / 2, y + height / 2 - 0.08, name, color=ink, fontsize=9.5)
        badge(ax, theme, x + width - 0.16, y + height - 0.04, chapter, color)


def badge(ax: Axes, theme: Theme, x: float, y: float, chapter: int, color: str) -> None:
    ax.add_patch(Circle((x, y), 0.13, facecolor=color, edgecolor=theme.paper, linewidth=1.2, zorder=3))
    label(ax, theme, x, y - 0.005, str(chapter), color="#ffffff", fontsize=8, fontweight="bold", zorder=4)
