"""The tree after each of four events: a first prompt, one that shares its beginning, a next turn, an eviction."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from chapters.figures import REQUESTS, Theme, arrow, diagram, label, tint

SIZE = 0.42
FIRST, SECOND, THIRD = REQUESTS[:3]


def node(axes: Axes, theme: Theme, x: float, y: float, pages: list[tuple[str, str]]) -> tuple[float, float, float]:
    """A run of pages with the top left corner (x, y); returns its middle at the top and its lower edge."""
    for i, (name, color) in enumerate(pages):
        axes.add_patch(
            Rectangle(
                (x + i * SIZE, y - SIZE), SIZE, SIZE, facecolor=tint(theme, color, 0.35), edgecolor=color, linewidth=1.1
            )
        )
        label(axes, theme, x + (i + 0.5) * SIZE, y - SIZE / 2, name, fontsize=9)
    return x + len(pages) * SIZE / 2, y, y - SIZE


def draw(theme: Theme) -> Figure:
    figure, axes = diagram(8.6, 4.5)
    titles = [
        ("request 1 has run", "nothing found, 4 pages added"),
        ("request 2 has run", "S₁ S₂ found, node split there"),
        ("request 1's next turn", "4 pages found, Q₃ added"),
        ("evict 1 page (lru)", "Q₂, the oldest leaf"),
    ]
    for i, (title, note) in enumerate(titles):
        left = 0.2 + i * 2.12
        label(axes, theme, left + 0.95, 4.25, title, weight="bold", fontsize=9.5)
        label(axes, theme, left + 0.95, 3.98, note, color=theme.muted, fontsize=8.5)
        tops = [3.6 - 0.82 * level for level in range(4)]
        x = left + 0.3
        if i == 0:
            above = node(axes, theme, x + 0.1, tops[0], [("S₁", FIRST), ("S₂", FIRST), ("Q₁", FIRST)])
            chain = [("A₁", FIRST)]
        else:
            above = root = node(axes, theme, x + 0.2, tops[0], [("S₁", FIRST), ("S₂", FIRST)])
            chain = [("Q₁", FIRST), ("A₁", FIRST), ("Q₃", THIRD)][: 3 if i > 1 else 2]
            if i < 3:
                q2 = node(axes, theme, x + 1.0, tops[1], [("Q₂", SECOND)])
                arrow(axes, theme, (root[0], root[2]), (q2[0], q2[1]))
            else:
                corner = (x + 1.0, tops[1] - SIZE)
                axes.add_patch(Rectangle(corner, SIZE, SIZE, facecolor="none", edgecolor=theme.muted, linestyle=":"))
        for level, page in enumerate(chain, 1):
            below = node(axes, theme, x + (0.52 if i == 0 else 0), tops[level], [page])
            arrow(axes, theme, (above[0], above[2]), (below[0], below[1]))
            above = below
    legend = [(FIRST, "computed for request 1"), (SECOND, "for request 2"), (THIRD, "for the next turn")]
    for (color, text), x in zip(legend, (1.0, 3.6, 5.5), strict=True):
        axes.plot([x], [0.2], marker="s", markersize=9, color=tint(theme, color, 0.35), markeredgecolor=color)
        label(axes, theme, x + 0.18, 0.2, text, ha="left", fontsize=9)
    return figure
