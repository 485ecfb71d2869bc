"""Three page tables and the pool: pages of a request lie anywhere, and only the last one has room to spare."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from chapters.figures import PAGE, REQUESTS, Theme, arrow, box, diagram, label, tint

PAGE_SIZE, SLOT, GAP = 4, 0.24, 0.2
COLUMNS, LEFT, TOP = 4, 3.3, 3.35
TABLES = [("A", 10, [6, 2, 9]), ("B", 5, [4, 11]), ("C", 7, [1, 7])]  # name, tokens, pages


def draw(theme: Theme) -> Figure:
    figure, axes = diagram(8.2, 4.0)
    width, rise = PAGE_SIZE * SLOT, SLOT + 0.62
    owner = {page: (i, j) for i, (_, _, pages) in enumerate(TABLES) for j, page in enumerate(pages)}
    label(axes, theme, LEFT + 2 * width + 1.5 * GAP, 3.8, "the pool of one layer, pages of 4 slots", weight="bold")
    corners = {}
    for page in range(12):
        row, column = divmod(page, COLUMNS)
        x, y = LEFT + column * (width + GAP), TOP - SLOT - row * rise
        corners[page] = x, y
        color = REQUESTS[owner[page][0]] if page in owner else ""
        used = 0
        if page in owner:
            i, j = owner[page]
            used = min(TABLES[i][1] - j * PAGE_SIZE, PAGE_SIZE)
        for slot in range(PAGE_SIZE):
            fill = tint(theme, color, 0.75) if slot < used else tint(theme, color, 0.2) if color else "none"
            fill = tint(theme, PAGE, 0.35) if page == 0 else fill
            place = (x + slot * SLOT, y)
            axes.add_patch(Rectangle(place, SLOT, SLOT, facecolor=fill, edgecolor=theme.faint, linewidth=0.8))
            if slot < used:
                token = owner[page][1] * PAGE_SIZE + slot
                label(axes, theme, x + (slot + 0.5) * SLOT, y + SLOT / 2, str(token), fontsize=8)
        edge = color or (PAGE if page == 0 else theme.muted)
        axes.add_patch(Rectangle((x, y), width, SLOT, fill=False, edgecolor=edge, linewidth=1.2))
        name = "0: the dummy" if page == 0 else f"{page}" if page in owner else f"{page}: free"
        label(axes, theme, x, y + SLOT + 0.12, name, color=theme.muted, fontsize=8, ha="left")
    label(axes, theme, 1.25, 3.8, "page tables", weight="bold")
    for i, (name, tokens, pages) in enumerate(TABLES):
        y = 3.0 - i * 0.86
        label(axes, theme, 0.2, y + 0.16, f"{name}, {tokens} tokens", ha="left", color=REQUESTS[i], weight="bold")
        for j, page in enumerate(pages):
            box(axes, theme, 0.2 + j * 0.42, y - 0.36, 0.36, 0.34, str(page), REQUESTS[i])
    start = (0.2 + 2 * 0.42 + 0.36, 3.0 - 0.19)  # A's third entry
    x, y = corners[9]
    arrow(axes, theme, start, (x, y + SLOT / 2 + 0.05), REQUESTS[0])
    start = (0.2 + 0.42 + 0.36, 3.0 - 0.86 - 0.19)  # B's second
    x, y = corners[11]
    axes.plot([start[0], 2.8, 2.8, x + width / 2], [start[1], start[1], 0.55, 0.55], color=REQUESTS[1], linewidth=1.1)
    arrow(axes, theme, (x + width / 2, 0.52), (x + width / 2, y), REQUESTS[1])
    words = "number: the token's position · pale: room in the last page · grey: may be written by padding"
    label(axes, theme, 4.1, 0.18, words, color=theme.muted, fontsize=9)
    return figure
