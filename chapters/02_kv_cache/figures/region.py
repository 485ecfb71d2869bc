"""One layer's region of slots, filling up: prefill writes a block, each decode one slot, the rest waits."""

from __future__ import annotations

from matplotlib.figure import Figure

from chapters.figures import NEW, K, Theme, V, cells, diagram, label

CAPACITY, SIZE, LEFT = 12, 0.3, 1.75
STEPS = [("empty", 0, 0), ("prefill of 5", 0, 5), ("decode", 5, 6), ("decode", 6, 7)]  # name, start, end


def draw(theme: Theme) -> Figure:
    figure, axes = diagram(7.4, 4.0)
    for slot in range(CAPACITY):
        label(axes, theme, LEFT + (slot + 0.5) * SIZE, 3.82, str(slot), color=theme.muted, fontsize=8)
    label(axes, theme, LEFT - 0.12, 3.82, "slot", color=theme.muted, fontsize=8, ha="right")
    for i, (name, start, end) in enumerate(STEPS):
        y = 3.62 - i * 0.9
        for half, (letter, color) in enumerate([("K", K), ("V", V)]):
            row = [NEW if start <= slot < end else color if slot < start else "" for slot in range(CAPACITY)]
            cells(axes, theme, LEFT, y - half * SIZE, [row], SIZE)
            label(axes, theme, LEFT - 0.16, y - (half + 0.5) * SIZE, letter, color=color, weight="bold")
        label(axes, theme, 0.2, y - SIZE, name, ha="left", weight="bold")
        text = f"start = {start}, end = {end}" if end else "lengths[layer] = 0"
        label(axes, theme, LEFT + CAPACITY * SIZE + 0.2, y - SIZE, text, ha="left", fontsize=9)
    label(
        axes,
        theme,
        LEFT,
        0.15,
        "red: written in this step · colour: kept · empty: reserved, not used",
        color=theme.muted,
        fontsize=9,
        ha="left",
    )
    return figure
