"""An abort that meets a step, from a recording: what client, front and engine's process did, on one clock."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from benchmarks.record import load
from chapters.figures import NEW, PAGE, REQUESTS, Theme, chart, tint

LANES = {"client": 2.0, "front": 1.0, "engine": 0.0}


def draw(theme: Theme) -> Figure:
    events: list[dict[str, Any]] = load("ch10_serving")["data"]["abort"]["events"]
    figure, axes = chart(theme, "ms since the client hung up", "", 7.8, 3.3)
    gone = next(event["id"] for event in events if event["what"] == "Abort")
    ended = next(e for e in events if e["who"] == "engine" and [gone, "abort"] in e.get("outputs", []))
    steps, begin = list[tuple[float, float, dict[str, Any]]](), 0.0
    for event in (event for event in events if event["who"] == "engine"):
        if event["what"] == "step begins":
            begin = event["ms"]
        elif event["what"] == "StepDone":
            steps.append((begin, event["ms"], event))
    steps = [step for step in steps if step[1] <= ended["ms"]] + [s for s in steps if s[0] >= ended["ms"]][:1]
    axes.set(xlim=(steps[0][0] - 10, steps[-1][1] + 10), ylim=(-0.62, 2.5))

    for i, (start, end, told) in enumerate(steps):
        ids = [request for request, reason in told["outputs"] if reason is None]
        for j, request in enumerate(sorted(ids, reverse=True)):
            color, height = REQUESTS[1 if request == gone else 0], 0.5 / len(ids)
            shape = Rectangle((start, j * height - 0.25), end - start, height, facecolor=tint(theme, color, 0.5))
            axes.add_patch(shape)
        look = {"fill": False, "edgecolor": theme.paper, "linewidth": 2}
        axes.add_patch(Rectangle((start, -0.25), end - start, 0.5, **look))
        words = f"step {i}: {len(ids)} answer{'s' * (len(ids) > 1)}"
        axes.text((start + end) / 2, -0.33, words, ha="center", va="top", fontsize=8, color=theme.ink)
        free = f"{told['pages_available']} pages available"
        axes.text((start + end) / 2, -0.47, free, ha="center", va="top", fontsize=7.5, color=theme.muted)
    times = {(event["who"], event["what"]): event["ms"] for event in events if event["what"] != "StepDone"}
    for told in (event for _, _, event in steps[:-1]):
        lost = told["ms"] > times["front", "Abort"] and [gone, None] in told["outputs"]
        color = NEW if told is ended else REQUESTS[1] if lost else PAGE
        tip = {"arrowstyle": "-|>", "color": color, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (told["ms"], 0.94), (told["ms"], 0.25), arrowprops=tip)
        brings = "its end" if told is ended else "a token\nfor nobody" if lost else ""
        words = f"StepDone: {brings}" if brings else "StepDone"
        axes.text(told["ms"] + 6, 0.74, words, va="center", fontsize=8.5, color=theme.ink)
    for start, end in (
        ((0.0, LANES["client"]), (times["front", "http.disconnect"], 1.06)),
        ((times["front", "Abort"], 0.94), (times["engine", "Abort"], 0.25)),
    ):
        tip = {"arrowstyle": "-|>", "color": NEW, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", end, start, arrowprops=tip)
    axes.plot([0], [2], "o", color=NEW, markersize=6)
    took = f"{times['front', 'Abort']:.1f}"
    axes.text(10, 2.14, "hangs up", va="center", fontsize=8.5, color=theme.ink)
    axes.text(10, 1.16, f"hears of it, and sends Abort after {took} ms", va="center", fontsize=8.5, color=theme.ink)
    axes.text(times["engine", "Abort"] + 6, 0.43, "takes Abort", va="center", fontsize=8.5, color=theme.ink)
    for y in (1.0, 2.0):
        axes.axhline(y, color=theme.faint, linewidth=1, zorder=0)
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_yticks(list(LANES.values()), ["client", "front", "engine's\nprocess"])
    return figure
