"""Grouped-query attention: nine query heads look through three KV heads."""

from __future__ import annotations

from matplotlib.figure import Figure

from chapters.figures import K, Q, Theme, V, arrow, box, diagram, label

HEADS, KV_HEADS = 9, 3


def draw(theme: Theme) -> Figure:
    figure, axes = diagram(7.2, 2.9)
    group, left, pitch, width = HEADS // KV_HEADS, 1.1, 0.67, 0.52
    label(axes, theme, 0.95, 2.4, "query heads", ha="right", color=theme.muted)
    label(axes, theme, 0.95, 0.62, "KV heads", ha="right", color=theme.muted)
    for g in range(KV_HEADS):
        first = left + g * group * pitch
        centre = first + ((group - 1) * pitch + width) / 2
        box(axes, theme, centre - 0.62, 0.42, 0.57, 0.4, f"k{g}", K)
        box(axes, theme, centre + 0.05, 0.42, 0.57, 0.4, f"v{g}", V)
        label(axes, theme, centre, 0.17, f"read once for {group} query heads", color=theme.muted, fontsize=8)
        for h in range(g * group, (g + 1) * group):
            x = left + h * pitch
            box(axes, theme, x, 2.2, width, 0.4, f"q{h}", Q)
            arrow(axes, theme, (x + width / 2, 2.2), (centre - 0.3 + (h % group - 1) * 0.12, 0.83), Q)
    label(axes, theme, 4.1, 2.78, "query head h reads KV head h // 3", fontsize=9, color=theme.muted)
    return figure
