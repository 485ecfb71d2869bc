"""A tile of queries moves over keys that lie in pages: tiles that all see, then tiles behind a mask."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from chapters.figures import NEW, PAGE, K, Q, Theme, arrow, diagram, label, tint

SIZE, TILE, PAGE_SIZE, LENGTH, NEW_TOKENS, GROUP = 0.29, 4, 2, 15, 3, 2
PAGES = [7, 2, 9, 4, 1, 11, 6, 3]


def draw(theme: Theme) -> Figure:
    figure, axes = diagram(8.4, 4.2)
    left, top = 2.3, 2.9
    rows = NEW_TOKENS * GROUP
    tiles = -(-LENGTH // TILE)
    edge = (LENGTH - NEW_TOKENS + 1) // TILE
    for tile in range(tiles):
        x = left + tile * (TILE * SIZE + 0.26)
        color = NEW if tile >= edge else K
        title = "masked" if tile >= edge else "seen by all"
        middle = x + TILE * SIZE / 2
        label(axes, theme, middle, top + 1.12, f"tile {tile}: {title}", color=color, fontsize=8, weight="bold")
        for j in range(TILE):
            position = tile * TILE + j
            real = position < LENGTH
            if j % PAGE_SIZE == 0:
                page = PAGES[position // PAGE_SIZE]
                place = (x + j * SIZE, top + 0.52)
                look = {"facecolor": tint(theme, PAGE, 0.3), "edgecolor": PAGE}
                axes.add_patch(Rectangle(place, PAGE_SIZE * SIZE - 0.03, 0.3, linewidth=0.9, **look))
                label(axes, theme, x + (j + 1) * SIZE - 0.015, top + 0.67, f"page {page}", fontsize=7)
            if real:
                label(axes, theme, x + (j + 0.5) * SIZE, top + 0.3, str(position), fontsize=8, color=theme.muted)
            for row in range(rows):
                asks = LENGTH - NEW_TOKENS + row // GROUP
                seen = real and position <= asks
                fill = tint(theme, color, 0.55) if seen else "none"
                corner = (x + j * SIZE, top - (row + 1) * SIZE)
                axes.add_patch(Rectangle(corner, SIZE, SIZE, facecolor=fill, edgecolor=theme.faint, linewidth=0.8))
        outline = {"fill": False, "edgecolor": color, "linewidth": 1.3}
        axes.add_patch(Rectangle((x, top - rows * SIZE), TILE * SIZE, rows * SIZE, **outline))
        if tile:
            arrow(axes, theme, (x - 0.28, top - rows * SIZE - 0.26), (x + 0.05, top - rows * SIZE - 0.26))
        label(axes, theme, middle, top - rows * SIZE - 0.26, "three numbers" if tile else "−∞, 0, 0", fontsize=8)
    for row in range(rows):
        y = top - (row + 0.5) * SIZE
        look = {"facecolor": tint(theme, Q, 0.55), "edgecolor": theme.faint, "linewidth": 0.8}
        axes.add_patch(Rectangle((1.55, y - SIZE / 2), 0.55, SIZE, **look))
        words = f"token {LENGTH - NEW_TOKENS + row // GROUP}, head {row % GROUP}"
        label(axes, theme, 1.47, y, words, ha="right", fontsize=8)
    label(axes, theme, 1.82, top + 0.3, "queries", fontsize=9, color=Q)
    label(axes, theme, 2.1, top + 0.67, "K and V:", fontsize=9, ha="right", color=theme.muted)
    words = "filled: a score that counts · empty in a red tile: −∞, after the query or after the end"
    label(axes, theme, 4.2, 0.2, words, fontsize=9, color=theme.muted)
    return figure
