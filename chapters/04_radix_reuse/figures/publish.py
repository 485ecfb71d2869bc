"""Two equal prompts computed in the same step: what their page tables say before and after publish."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from chapters.figures import NEW, REQUESTS, Theme, diagram, label, tint

SIZE = 0.42


def row(axes: Axes, theme: Theme, x: float, y: float, name: str, pages: list[tuple[str, str]]) -> None:
    """A list of pages with its name at the left; each entry is a page number and a colour."""
    label(axes, theme, x - 0.12, y - SIZE / 2, name, ha="right", fontsize=9)
    for i, (page, color) in enumerate(pages):
        corner = (x + i * SIZE, y - SIZE)
        face = tint(theme, color, 0.35)
        axes.add_patch(Rectangle(corner, SIZE, SIZE, facecolor=face, edgecolor=color, linewidth=1.1))
        label(axes, theme, x + (i + 0.5) * SIZE, y - SIZE / 2, page, fontsize=9)


def draw(theme: Theme) -> Figure:
    figure, axes = diagram(8.4, 2.75)
    first, second = REQUESTS[:2]
    own, other = [(page, first) for page in "123"], [(page, second) for page in "456"]
    panels = [
        ("planned together", [("request 1", own), ("request 2", other), ("tree", []), ("free", [])]),
        ("request 1 published", [("request 1", own), ("request 2", other), ("tree", own[:2]), ("free", [])]),
        (
            "request 2 published",
            [
                ("request 1", own),
                ("request 2", [("1", NEW), ("2", NEW), other[2]]),
                ("tree", own[:2]),
                ("free", other[:2]),
            ],
        ),
    ]
    for i, (title, rows) in enumerate(panels):
        left = 1.05 + i * 2.75
        label(axes, theme, left + 0.55, 2.55, title, weight="bold", fontsize=9.5)
        for j, (name, pages) in enumerate(rows):
            row(axes, theme, left, 2.28 - j * 0.56, name, pages)
            if not pages:
                label(axes, theme, left + 0.1, 2.28 - j * 0.56 - SIZE / 2, "–", color=theme.muted)
    return figure
