"""Measured: bytes of the cache that eight conversations reserved, and the bytes that they used."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.record import load
from chapters.figures import REQUESTS, Theme, chart, legend, tint


def draw(theme: Theme) -> Figure:
    conversations = load("ch02_length")["data"]["conversations"]
    figure, axes = chart(theme, "MB of K and V", "conversation", height=3.0)
    rows = range(1, len(conversations) + 1)
    reserved = [c["reserved_bytes"] / 1e6 for c in conversations]
    used = [c["used_bytes"] / 1e6 for c in conversations]
    axes.barh(rows, reserved, color=tint(theme, theme.muted, 0.3), label="reserved")
    axes.barh(rows, used, color=REQUESTS[0], label="used")
    axes.set_yticks(rows)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    legend(axes, theme, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return figure
