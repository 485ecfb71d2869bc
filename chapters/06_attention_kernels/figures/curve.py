"""Measured: what cutting sequences into splits is worth, in Triton, for two small batches."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.record import load
from chapters.figures import NEW, K, Q, Theme, chart, legend


def draw(theme: Theme) -> Figure:
    data = load("ch06_attention")["data"]
    figure, axes = chart(theme, "splits of each sequence", "TB/s", height=3.0)
    for batch, color, marker in ((1, Q, "o"), (16, K, "s")):
        rows = [row for row in data["splits"] if row["batch"] == batch]
        name = f"{batch} × {rows[0]['context']:,} keys"
        axes.plot([r["splits"] for r in rows], [r["tb_s"] for r in rows], marker=marker, color=color, label=name)
    axes.axhline(data["limits"]["copy_tb_s"], color=NEW, linewidth=1.1, linestyle="--", label="a copy")
    ticks = sorted({row["splits"] for row in data["splits"] if row["splits"] & (row["splits"] - 1) == 0})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(t) for t in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    legend(axes, theme, fontsize=8)
    return figure
