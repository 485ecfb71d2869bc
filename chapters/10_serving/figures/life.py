"""A request's life: from its client through the front to the engine's process, and its answer's way back."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from chapters.figures import NEW, PAGE, REQUESTS, Theme, arrow, box, diagram, label

THERE, BACK = REQUESTS[0], REQUESTS[2]
HEIGHT = 0.62


def frame(axes: Axes, theme: Theme, x: float, y: float, width: float, height: float, title: str, note: str) -> None:
    shape = "round,pad=0,rounding_size=0.1"
    look = {"boxstyle": shape, "facecolor": "none", "edgecolor": theme.muted, "linestyle": (0, (4, 3))}
    axes.add_patch(FancyBboxPatch((x, y), width, height, **look))
    label(axes, theme, x + width / 2, y + height + 0.31, title, weight="bold", fontsize=10)
    label(axes, theme, x + width / 2, y + height + 0.12, note, fontsize=8.5, color=theme.muted)


def station(axes: Axes, theme: Theme, x: float, y: float, width: float, name: str, does: str, color: str) -> None:
    """A box around the point (x, y): a symbol of the code, and what it does."""
    box(axes, theme, x - width / 2, y - HEIGHT / 2, width, HEIGHT, "", color)
    label(axes, theme, x, y + 0.11, name, weight="bold", fontsize=8)
    label(axes, theme, x, y - 0.12, does, fontsize=8)


def draw(theme: Theme) -> Figure:
    figure, axes = diagram(8.6, 4.3)
    top, middle, bottom = 3.05, 1.96, 0.87
    frame(axes, theme, 1.2, 0.35, 4.95, 3.2, "the front", "HTTP, JSON, text")
    frame(axes, theme, 7.0, 0.35, 1.5, 3.2, "the engine's process", "token ids")
    box(axes, theme, 0.1, bottom - 0.4, 0.7, top - bottom + 0.8, "client", PAGE)

    there = (("Gate", "key, size"), ("ChatRequest", "every field"), ("Service._hold", "place, or 429"))
    places, half = [1.81, 2.92, 4.03], 0.49
    for x, words in zip(places, there, strict=True):
        station(axes, theme, x, top, 2 * half, *words, THERE)
    station(axes, theme, 5.34, top, 1.42, "EngineClient.encode", "text to ids", THERE)
    back = (("Service._stream", "events"), ("Answer.read", "ids to text, joined"), ("Answer.receive", "noted"))
    spots = [1.98, 3.66, 5.34]
    for x, words in zip(spots, back, strict=True):
        station(axes, theme, x, bottom, 1.32, *words, BACK)
    station(axes, theme, 1.98, middle, 1.32, "Live", "hears the hang-up", NEW)
    station(axes, theme, 5.34, middle, 1.32, "EngineClient.abort", "if it is still open", NEW)
    for y, name, does, color in (
        (top, "Front.messages", "take all of them", THERE),
        (middle, "Engine.step", "one for the batch", PAGE),
        (bottom, "Server._tell", "what is new", BACK),
    ):
        station(axes, theme, 7.72, y, 1.14, name, does, color)

    ends, begins = [0.8, *(x + half for x in places), 6.05], [*(x - half for x in places), 4.63, 7.15]
    for end, begin in zip(ends, begins, strict=True):
        arrow(axes, theme, (end, top), (begin, top), THERE)
    arrow(axes, theme, (7.15, bottom), (spots[2] + 0.66, bottom), BACK)
    for right, left in ((spots[2], spots[1]), (spots[1], spots[0])):
        arrow(axes, theme, (right - 0.66, bottom), (left + 0.66, bottom), BACK)
    arrow(axes, theme, (spots[0] - 0.66, bottom), (0.8, bottom), BACK)
    arrow(axes, theme, (0.8, middle), (spots[0] - 0.66, middle), NEW)
    arrow(axes, theme, (spots[0] + 0.66, middle), (spots[2] - 0.66, middle), NEW)
    arrow(axes, theme, (spots[2] + 0.66, middle + 0.1), (7.15, top - 0.22), NEW)
    arrow(axes, theme, (7.72, top - HEIGHT / 2), (7.72, middle + HEIGHT / 2))
    arrow(axes, theme, (7.72, middle - HEIGHT / 2), (7.72, bottom + HEIGHT / 2))
    axes.plot([8.29, 8.41, 8.41], [bottom, bottom, top], color=theme.muted, linewidth=1.1, solid_joinstyle="round")
    arrow(axes, theme, (8.43, top), (8.27, top))

    label(axes, theme, 6.58, top + 0.13, "Submit", weight="bold", fontsize=9)
    label(axes, theme, 6.58, bottom + 0.13, "StepDone", weight="bold", fontsize=9)
    label(axes, theme, 6.66, middle + 0.22, "Abort", weight="bold", fontsize=9)
    label(axes, theme, 3.66, middle + 0.13, "its work is cancelled; finally …", fontsize=8, color=theme.muted)
    label(axes, theme, 6.58, 0.55, "ZeroMQ", fontsize=8.5, color=theme.muted)
    note = "one StepDone a step, for all answers; neither process waits for the other"
    label(axes, theme, 4.3, 0.14, note, fontsize=9, color=theme.muted)
    return figure
