"""The same four requests in four modes: traces of the real scheduler, on the clock of benchmarks/ch05_clock.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from matplotlib.figure import Figure

from benchmarks.ch05_clock import MODES, by_hand, simulate, switches
from chapters.draw import read_trace, timeline
from chapters.figures import Theme

NAMES = {
    "static": "static: a group runs to its end",
    "continuous": "continuous: a prompt goes first, whole",
    "chunked": "chunked: a prompt goes first, in chunks of 100",
    "mixed": "mixed: 100 tokens a step, decodes first",
}


def draw(theme: Theme) -> Figure:
    figure = Figure(figsize=(7.6, 7.4), layout="constrained")
    panels = figure.subplots(len(MODES), 1, sharex=True)
    with TemporaryDirectory() as folder:
        for axes, mode in zip(panels, MODES, strict=True):
            path = str(Path(folder) / "trace")
            run = simulate(by_hand(), switches(mode, max_batch_tokens=100, max_running_requests=4), trace=path)
            trace = read_trace(path)
            ends = [end for _, end, _ in run.steps]
            steps = [replace(step, time=round(end, 3)) for step, end in zip(trace.steps, ends, strict=True)]
            timeline(
                replace(trace, steps=steps), axes, theme, by="time", names=lambda i: "ABCD"[i], key=mode == "mixed"
            )
            axes.set_title(NAMES[mode], loc="left", fontsize=10, color=theme.ink)
            axes.set(xlabel="", ylabel="")
            for request, job in enumerate(by_hand()):  # when it came
                axes.plot([job.arrival_ms], [request], marker="|", markersize=11, color=theme.ink)
            axes.set_xlim(-2, 178)
    panels[-1].set_xlabel("milliseconds; a step takes 10 and 0.1 for each token", color=theme.ink)
    return figure
