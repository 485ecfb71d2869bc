"""The causal triangle: which tokens each token may look at, and which rows a step needs."""

from __future__ import annotations

from matplotlib.figure import Figure

from chapters.figures import NEW, Q, Theme, arrow, cells, diagram, label

WORDS = ["The", "capital", "of", "France", "is", "Paris"]


def draw(theme: Theme) -> Figure:
    figure, axes = diagram(7.2, 3.6)
    size, left, top = 0.42, 1.35, 2.85
    last = len(WORDS) - 1
    colors = [Q] * last + [NEW]
    rows = [[color] * (i + 1) + [""] * (last - i) for i, color in enumerate(colors)]
    cells(axes, theme, left, top, rows, size)
    for i, word in enumerate(WORDS):
        label(axes, theme, left - 0.1, top - (i + 0.5) * size, word, ha="right", color=NEW if i == last else theme.ink)
        label(axes, theme, left + (i + 0.35) * size, top + 0.08, word, ha="left", va="bottom", rotation=40, fontsize=9)
    label(axes, theme, 0.25, top - 3 * size, "query of", rotation=90, color=theme.muted)
    label(axes, theme, left + 3 * size, 3.48, "key and value of", color=theme.muted)
    right = left + len(WORDS) * size
    notes = [
        (0.5, "the first token sees only itself", theme.ink),
        (2.5, "empty: the future, score −∞", theme.ink),
        (5.5, "only this row chooses the next token;\nthe others were computed before", NEW),
    ]
    for row, text, color in notes:
        y = top - row * size
        label(axes, theme, right + 0.5, y, text, ha="left", color=color, fontsize=9)
        arrow(axes, theme, (right + 0.45, y), (right + 0.05, y), color)
    return figure
