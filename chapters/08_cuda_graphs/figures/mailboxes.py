"""The rows of the engine on the device after a step's changes: what the host sent, and what the steps write."""

from __future__ import annotations

from unittest.mock import patch

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from chapters.figures import NEW, REQUESTS, Q, Theme, arrow, box, diagram, label, tint
from minisgl.core import Batch, Request, SamplingParams
from minisgl.engine.rows import DeviceRows, Mailbox

PAGE_SIZE, PLACES, WIDTH = 16, 4, 3  # WIDTH: pages in a table
LEFT, TOP, CELL, HEIGHT = 3.35, 3.15, 0.4, 0.34  # of the table of rows
NAMES = "ABC"
COLORS = {0: REQUESTS[0], 1: REQUESTS[1], 2: REQUESTS[2]}


def scene() -> tuple[DeviceRows, list[int], list[int]]:
    """The rows after B has ended and A has come to a new page; where in the state the host wrote, and what."""
    rows = DeviceRows(PLACES, WIDTH * PAGE_SIZE, PAGE_SIZE, torch.device("cpu"))
    requests = []
    for i, (length, pages) in enumerate([(32, [1, 2]), (9, [3]), (21, [4, 5])]):
        params = SamplingParams(temperature=0.6)
        requests.append(Request(i, [*range(40, 40 + length)], params, seed=7 + i, pages=pages, row=i))
    a, b, c = requests
    rows.update(Batch([a, b, c], [31, 8, 20], [1, 1, 1], [(r, 0) for r in requests]), PLACES)
    a.pages.append(6)
    with patch.object(Mailbox, "send", autospec=True, side_effect=Mailbox.send) as send:
        rows.tokens[:3], rows.lengths[:3] = torch.tensor([311, 12, 87]), torch.tensor([32, 9, 21])  # a step wrote them
        rows.update(Batch([a, c], [32, 21], [1, 1], [(a, 2)]), PLACES)
    [call] = send.call_args_list
    at, values = call.args[1]
    return rows, at, values


def cell(axes: Axes, theme: Theme, x: float, y: float, text: str, color: str, new: bool, width: float = CELL) -> None:
    fill = tint(theme, NEW, 0.7) if new else tint(theme, color, 0.3) if color else "none"
    axes.add_patch(Rectangle((x, y), width, HEIGHT, facecolor=fill, edgecolor=theme.faint, linewidth=0.8))
    label(axes, theme, x + width / 2, y + HEIGHT / 2 - 0.01, text, fontsize=8.5)


def draw(theme: Theme) -> Figure:
    rows, at, values = scene()
    figure, axes = diagram(7.6, 4.05)
    row_y = {row: TOP - (row + 1) * HEIGHT for row in range(PLACES + 1)}
    fields = {"token": rows.tokens, "length": rows.lengths, "seed": rows.seeds}
    label(axes, theme, LEFT + WIDTH * CELL / 2, TOP + 0.14, "page table", fontsize=8.5, color=theme.muted)
    for i, name in enumerate(fields):
        x = LEFT + (WIDTH + 0.3) * CELL + i * 0.62
        label(axes, theme, x + 0.29, TOP + 0.14, name, fontsize=8.5, color=theme.muted)
    label(axes, theme, LEFT - 0.1, TOP + 0.14, "row", ha="right", fontsize=8.5, color=theme.muted)
    for row, y in row_y.items():
        color = "" if row in (1, 3, 4) else COLORS[row]
        owner = {0: "A", 2: "C", PLACES: "nobody"}.get(row, "–")
        look = {"ha": "right", "fontsize": 8.5}
        label(axes, theme, LEFT - 0.1, y + HEIGHT / 2, f"{owner}   {row}", **look)
        for i in range(WIDTH):
            place = rows.page_tables.storage_offset() + row * WIDTH + i
            shown = "" if row in (1, 3) else str(int(rows.page_tables[row, i]))
            cell(axes, theme, LEFT + i * CELL, y, shown, color, place in at)
        for i, field in enumerate(fields.values()):
            x = LEFT + (WIDTH + 0.3) * CELL + i * 0.62
            shown = "" if row in (1, 3) else str(int(field[row]))
            cell(axes, theme, x, y, shown, color, field.storage_offset() + row in at, 0.58)

    label(
        axes, theme, LEFT + 0.66, 3.72, "order: whose row is at which place", ha="left", fontsize=8.5, color=theme.muted
    )
    for i in range(PLACES):
        row = int(rows.order[i])
        new = rows.order.storage_offset() + i in at
        cell(axes, theme, LEFT - 1.1 + i * CELL, 3.56, str(row), COLORS.get(row, ""), new)

    box(axes, theme, 0.15, 1.75, 1.75, 1.3, "", NEW)
    label(axes, theme, 1.02, 2.87, "the host sends", weight="bold", fontsize=9)
    names = {rows.page_tables.storage_offset() + 2: "A's table, place 2"}
    names |= {rows.order.storage_offset() + i: f"order, place {i}" for i in range(PLACES)}
    for i, (place, value) in enumerate(zip(at, values, strict=True)):
        label(axes, theme, 0.25, 2.62 - 0.2 * i, f"{names[place]} ← {value}", ha="left", fontsize=8.5)
    label(axes, theme, 1.02, 1.9, f"one copy, {16 * len(at)} bytes", fontsize=8.5, color=theme.muted)
    arrow(axes, theme, (1.9, 2.6), (2.6, 2.6), NEW)

    right = LEFT + (WIDTH + 0.3) * CELL + 3 * 0.62
    box(
        axes,
        theme,
        2.6,
        0.3,
        4.2,
        0.72,
        "the graph: rows → inputs → layers → sampled tokens\nalways at the same addresses",
        Q,
    )
    arrow(axes, theme, (LEFT + 0.6, row_y[PLACES]), (LEFT + 0.6, 1.02), Q)
    axes.plot([6.8, right + 0.5, right + 0.5], [0.66, 0.66, 2.3], color=Q, linewidth=1.1)
    arrow(axes, theme, (right + 0.5, 2.3), (right - 0.02, 2.3), Q)
    label(axes, theme, right + 0.48, 2.62, "token and\nlength of the\nnext step", fontsize=8, color=theme.muted)
    return figure
