"""Predicted, not measured: how much sooner a decode step is over on N ranks, by the cost model of ch09_bytes."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.record import load
from chapters.figures import REQUESTS, Theme

SHAPES = {"Qwen3-0.6B": ("qwen3-0_6b", REQUESTS[0]), "Llama-2-70B": ("llama-2-70b", REQUESTS[1])}
LINKS = {"NVLink": ("nvlink", "-"), "PCIe": ("pcie", (0, (4, 2)))}
BATCHES = {"1": "1 request", "256": "256 requests"}


def draw(theme: Theme) -> Figure:
    shapes = load("ch09_bytes")["data"]["shapes"]
    figure = Figure(figsize=(7.4, 3.5), layout="constrained")
    for axes, (batch, title) in zip(figure.subplots(1, 2, sharey=True), BATCHES.items(), strict=True):
        axes.patch.set_alpha(0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(theme.muted)
        axes.tick_params(colors=theme.muted, labelcolor=theme.ink)
        axes.grid(color=theme.faint, linewidth=0.8)
        for name, (shape, color) in SHAPES.items():
            sizes = [int(size) for size in shapes[shape]]
            for kind, (link, line) in LINKS.items():
                gains = [ranks["predicted"][link][batch]["speed_up"] for ranks in shapes[shape].values()]
                look = {"color": color, "linestyle": line, "marker": "o", "markersize": 4}
                axes.plot(sizes, gains, label=f"{name}, {kind}", **look)
        axes.plot(sizes, sizes, color=theme.muted, linestyle=(0, (1, 2)), linewidth=1, label="N times")
        axes.axhline(1, color=theme.muted, linewidth=1)
        axes.set(xlim=(0.7, 8.3), yscale="log", ylim=(0.18, 9))
        axes.minorticks_off()
        axes.set_xticks(sizes)
        axes.set_yticks([0.25, 0.5, 1, 2, 4, 8], ["1/4", "1/2", "1", "2", "4", "8"])
        axes.set_title(f"predicted: {title}", loc="left", color=theme.ink, fontsize=10)
        axes.set_xlabel("ranks", color=theme.ink)
    figure.axes[0].set_ylabel("speed-up of a decode step", color=theme.ink)
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=5, frameon=False, labelcolor=theme.ink, fontsize=8)
    return figure
