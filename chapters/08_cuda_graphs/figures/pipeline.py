"""Host and GPU without and with a step in flight, and the token that comes after the end of a sequence."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from chapters.figures import NEW, PAGE, REQUESTS, Theme, arrow, diagram, label, tint

PLAN, RUN, RETIRE = 0.34, 0.9, 0.2  # inches of a step: plan and launch, on the GPU, retire
LEFT, HEIGHT, STEPS = 1.0, 0.34, 5
END = 2  # the step whose token ends request A: A is in the next step already


def block(axes: Axes, theme: Theme, x: float, y: float, width: float, text: str, color: str) -> None:
    look = {"edgecolor": theme.paper, "linewidth": 1}
    axes.add_patch(Rectangle((x, y), width, HEIGHT, facecolor=tint(theme, color, 0.55), **look))
    label(axes, theme, x + width / 2, y + HEIGHT / 2, text, fontsize=8.5)


def lanes(axes: Axes, theme: Theme, y: float, title: str) -> None:
    label(axes, theme, 0.1, y + 1.1, title, ha="left", weight="bold", fontsize=9.5)
    for name, at in (("host", y + 0.5), ("GPU", y)):
        label(axes, theme, LEFT - 0.15, at + HEIGHT / 2, name, ha="right", fontsize=9)
        axes.plot([LEFT, 7.5], [at, at], color=theme.faint, linewidth=0.8, zorder=0)


def draw(theme: Theme) -> Figure:
    figure, axes = diagram(7.6, 4.0)
    blue = REQUESTS[0]

    y, x = 2.55, LEFT
    lanes(axes, theme, y, "one after the other")
    for step in range(4):
        block(axes, theme, x, y + 0.5, PLAN, f"p{step}", PAGE)
        block(axes, theme, x + PLAN, y, RUN, f"step {step}", blue)
        block(axes, theme, x + PLAN + RUN, y + 0.5, RETIRE, f"r{step}", PAGE)
        x += PLAN + RUN + RETIRE

    y, x = 0.75, LEFT + PLAN
    lanes(axes, theme, y, "one step in flight")
    block(axes, theme, LEFT, y + 0.5, PLAN, "p0", PAGE)
    for step in range(STEPS + 1):
        block(axes, theme, x, y, RUN, f"step {step}", blue)
        at = x + 0.02
        if step:
            block(axes, theme, at, y + 0.5, RETIRE, f"r{step - 1}", NEW if step - 1 in (END, END + 1) else PAGE)
            at += RETIRE
        block(axes, theme, at, y + 0.5, PLAN, f"p{step + 1}", PAGE)
        x += RUN
    late = LEFT + PLAN + (END + 1) * RUN  # where the step starts that A should not be in
    axes.add_patch(Rectangle((late, y), RUN, 0.07, facecolor=NEW, linewidth=0))
    arrow(axes, theme, (late - 0.1, y + HEIGHT), (late + 0.1, y + 0.5), NEW)
    look = {"fontsize": 8.5, "color": NEW}
    label(axes, theme, late - 0.1, y + 1.02, f"r{END}: A's token of step {END} ends it", **look)
    label(axes, theme, late + RUN / 2, y - 0.18, f"A is in step {END + 1} already", **look)
    label(axes, theme, late + RUN + 0.1, y + 1.02, f"r{END + 1}: its token is dropped", ha="left", **look)
    note = "p: plan and launch, r: retire. A late token costs one row of one step"
    label(axes, theme, 3.8, 0.18, note, color=theme.muted, fontsize=9)
    return figure
