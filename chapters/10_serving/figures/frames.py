"""A stream as its client's socket received it: one line an event, bracketed as they came together."""

from __future__ import annotations

import json
import re

from matplotlib.figure import Figure

from benchmarks.record import load
from chapters.figures import NEW, PAGE, REQUESTS, Theme, diagram, label

MONO = {"family": "monospace", "fontsize": 8, "ha": "left", "parse_math": False}
LINE = 0.235


def events(packet: str) -> list[str]:
    """The lines behind `data: ` in what the socket read at once; HTTP's own lines are left out."""
    return re.findall(r"^data: (.*)\n\n", packet.replace("\r\n", "\n"), re.MULTILINE)


def said(data: str) -> tuple[str, str]:
    """What is new in an event, as JSON with the rest left out, and what it is for."""
    if data == "[DONE]":
        return data, "the end"
    body = json.loads(data)
    if not body["choices"]:
        usage = {name: body["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
        return f'{{… "usage": {json.dumps(usage)[:-1]}, …}}, "choices": []}}', "the usage"
    choice = body["choices"][0]
    shown = {"delta": choice["delta"], "finish_reason": choice["finish_reason"]}
    what = "the role" if "role" in choice["delta"] else "the reason" if choice["finish_reason"] else "text"
    what = "a token without text" if choice["delta"].get("content") == "" and what == "text" else what
    return f"{{… {json.dumps(shown)[1:-1]} …}}", what


def draw(theme: Theme) -> Figure:
    packets = load("ch10_serving")["data"]["stream"]["packets"]
    times = [(packet["ms"], events(packet["bytes"])) for packet in packets]
    times = [(ms, found) for ms, found in times if found]
    num = sum(len(found) for _, found in times)
    height = LINE * num + 0.08 * len(times) + 0.62
    figure, axes = diagram(8.5, height)
    label(axes, theme, 0.05, height - 0.17, "came after", ha="left", fontsize=8.5, color=theme.muted)
    label(axes, theme, 6.92, height - 0.17, "what it brings", ha="left", fontsize=8.5, color=theme.muted)
    y = height - 0.42
    for ms, found in times:
        top = y + LINE / 2
        label(axes, theme, 0.68, y, f"{ms:,.0f} ms", ha="right", fontsize=8.5)
        for data in found:
            words, what = said(data)
            color = NEW if what in ("the reason", "the end") else REQUESTS[0] if what == "text" else PAGE
            label(axes, theme, 0.88, y, "data: ", color=theme.muted, **MONO)
            label(axes, theme, 1.36, y, words, **MONO)
            label(axes, theme, 6.8, y, "↵↵", ha="right", fontsize=9, color=NEW)
            label(axes, theme, 6.92, y, what, ha="left", fontsize=8.5, color=color)
            y -= LINE
        axes.plot([0.82, 0.76, 0.76, 0.82], [top, top, y + LINE / 2, y + LINE / 2], color=theme.muted, linewidth=1)
        y -= 0.08
    note = "↵↵ is the empty line that ends an event; bracketed: came at once; … is left out"
    label(axes, theme, 4.25, 0.13, note, fontsize=8.5, color=theme.muted)
    return figure
