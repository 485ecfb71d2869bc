"""One mixed step of the run by hand: a decode, the end of one prompt and the beginning of another."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from benchmarks.ch05_clock import by_hand, simulate, switches
from chapters.figures import REQUESTS, Theme, diagram, label, tint

STEP = 4  # of the mixed run: the fifth
LEFT, WIDTH = 1.25, 6.1


def draw(theme: Theme) -> Figure:
    run = simulate(by_hand(), switches("mixed", max_batch_tokens=100, max_running_requests=4))
    _, _, rows = run.steps[STEP]
    total = sum(n for *_, n in rows)
    least = 0.66  # a decode is one token of a hundred: drawn to scale it would be a line
    share = (WIDTH - least * len(rows)) / total
    figure, axes = diagram(7.6, 2.85)
    label(axes, theme, LEFT - 0.15, 2.2, "a row", ha="right", weight="bold")
    label(axes, theme, LEFT - 0.15, 1.52, "positions", ha="right", color=theme.muted, fontsize=9)
    label(axes, theme, LEFT - 0.15, 1.2, "K and V read", ha="right", color=theme.muted, fontsize=9)
    label(axes, theme, LEFT - 0.15, 0.88, "next token", ha="right", color=theme.muted, fontsize=9)
    x = LEFT
    for request, start, n in rows:
        width, color = least + share * n, REQUESTS[request]
        corner, look = (x, 1.85), {"edgecolor": theme.paper, "linewidth": 1.5}
        axes.add_patch(Rectangle(corner, width, 0.7, facecolor=tint(theme, color, 0.9 if n > 1 else 0.45), **look))
        middle = x + width / 2
        ink = "#ffffff" if n > 1 else theme.ink
        label(axes, theme, middle, 2.33, "ABCD"[request], weight="bold", color=ink)
        label(axes, theme, middle, 2.06, f"{n} tokens" if n > 1 else "1", fontsize=9, color=ink)
        last = start + n - 1
        label(axes, theme, middle, 1.52, f"{start} … {last}" if n > 1 else str(start), fontsize=9)
        label(axes, theme, middle, 1.2, f"0 … {last}", fontsize=9)
        complete = last >= by_hand()[request].prompt - 1
        label(axes, theme, middle, 0.88, "yes" if complete else "no: the prompt goes on", fontsize=9)
        x += width
    note = f"{total} tokens through the linear layers at once; attention looks at each request's own pages"
    label(axes, theme, LEFT + WIDTH / 2, 0.35, note, color=theme.muted, fontsize=9)
    return figure
