"""Two sequences, four splits each: partial results, log sums, and the program that comes last combines."""

from __future__ import annotations

from matplotlib.figure import Figure

from chapters.figures import NEW, REQUESTS, K, Theme, arrow, box, diagram, label

SPLITS, TILE = 4, 0.22


def draw(theme: Theme) -> Figure:
    figure, axes = diagram(8.4, 4.45)
    for row, (name, tiles) in enumerate([("A, 11 tiles of keys", 11), ("B, 2 tiles", 2)]):
        y = 3.7 - row * 2.1
        color = REQUESTS[row]
        label(axes, theme, 0.2, y + 0.16, name, ha="left", color=color, weight="bold")
        each = -(-tiles // SPLITS)
        used = -(-tiles // each)
        for split in range(SPLITS):
            x = 2.0 + split * 1.2
            count = max(0, min(each, tiles - split * each))
            for tile in range(count):
                box(axes, theme, x + tile * (TILE + 0.04), y, TILE, 0.32, "", color)
            if count:
                arrow(axes, theme, (x + 0.4, y - 0.04), (x + 0.4, y - 0.38))
                box(axes, theme, x - 0.05, y - 0.75, 0.95, 0.34, "acc, log", K)
                arrow(axes, theme, (x + 0.4, y - 0.78), (5.15 if row == 0 else 3.3, y - 1.12))
            else:
                label(axes, theme, x + 0.4, y + 0.16, "exits", color=theme.muted, fontsize=9)
        x = 4.0 if row == 0 else 2.2
        box(axes, theme, x, y - 1.47, 2.3, 0.34, f"the last of {used} combines", NEW)
        box(axes, theme, 7.2, y - 1.47, 0.9, 0.34, f"out {'AB'[row]}", color)
        arrow(axes, theme, (x + 2.32, y - 1.3), (7.18, y - 1.3))
    for split in range(SPLITS):
        label(axes, theme, 2.4 + split * 1.2, 4.22, f"split {split}", color=theme.muted, fontsize=9)
    label(axes, theme, 0.2, 4.22, "programs of one KV head", ha="left", color=theme.muted, fontsize=9)
    return figure
