"""Measured: how long the next token takes, by the number of tokens before it."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.record import load
from chapters.figures import NEW, WEIGHTS, Q, Theme, chart, legend


def draw(theme: Theme) -> Figure:
    data = load("ch01_length")["data"]
    lengths = [int(length) for length in data["curve"]]
    points = list(data["curve"].values())
    rate, read = data["machine"]["matmul_flops_per_s"], data["predicted"]["read_weights_s"]

    figure, axes = chart(theme, "tokens in the sequence = token rows computed for the next one", "milliseconds")
    axes.plot(lengths, [1000 * p["seconds"] for p in points], "o-", color=NEW, label="the next token, measured")
    axes.plot(
        lengths,
        [1000 * p["flops"] / rate for p in points],
        "--",
        color=Q,
        label="its arithmetic at this machine's rate",
    )
    axes.axhline(1000 * read, linestyle=":", color=WEIGHTS, label="reading the weights once")
    axes.set(xlim=(0, None), ylim=(0, None))
    legend(axes, theme)
    return figure
