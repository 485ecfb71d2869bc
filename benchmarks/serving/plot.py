"""Two charts of a run: latency against throughput, one dot a load, and how the times to the first token spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SHOWN = {"first_token_ms": "to the first token", "per_token_ms": "per token behind it", "end_to_end_ms": "whole answer"}


def save(
    path: Path, title: str, points: Mapping[str, Mapping[str, Any]], first_ms: Mapping[str, Sequence[float]]
) -> None:
    """Write a picture; its kind is that of the file's name.

    Args:
        points: figures by load, as `report.summary` gives them.
        first_ms: by load, the time to the first token of each request.
    """
    from matplotlib.figure import Figure

    from chapters.figures import LIGHT, REQUESTS

    figure = Figure(figsize=(10, 4.4), layout="constrained")
    curve, spread = figure.subplots(1, 2)
    figure.suptitle(title, color=LIGHT.ink)
    shown = sorted((p for p in points.values() if p["completed"]), key=lambda point: point["tokens_per_s"])
    speed = [point["tokens_per_s"] for point in shown]
    for (name, label), color in zip(SHOWN.items(), REQUESTS, strict=False):
        for percentile, style in (("p50", "o-"), ("p99", "s--")):
            values = [point[name][percentile] if point[name] else np.nan for point in shown]
            curve.plot(speed, values, style, color=color, label=f"{label}, {percentile}", markersize=4)
    curve.set(xlabel="output tokens/s", ylabel="ms", yscale="log")
    for (name, values), color in zip(first_ms.items(), REQUESTS * len(first_ms), strict=False):
        if not values:
            continue
        shares = np.arange(len(values) + 1) / len(values)
        ordered = sorted(values)
        spread.step(ordered[:1] + ordered, shares, where="post", color=color, label=name)
    spread.set(xlabel="ms to the first token", ylabel="share of the requests", ylim=(0, 1.02))
    for axes in (curve, spread):
        axes.grid(color=LIGHT.faint, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, facecolor="white")
