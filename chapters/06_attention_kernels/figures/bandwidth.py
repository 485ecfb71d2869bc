"""Measured: decode by batch and context, as shares of what a copy reaches."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.record import load
from chapters.figures import NEW, PAGE, K, Q, Theme, chart, label, legend, tint

SHOWN = {"256x1024": "256 × 1,024", "256x600": "256 × 600", "ragged": "256 × 100–2,000", "16x1024": "16 × 1,024"}
SHOWN |= {"1x32768": "1 × 32,768"}
COLORS = {"triton": Q, "cuda": K, "torch": PAGE}


def draw(theme: Theme) -> Figure:
    rows = load("ch06_attention")["data"]["decode"]
    figure, axes = chart(theme, "", "share of the copy's bandwidth, %", height=3.1)
    for i, (backend, color) in enumerate(COLORS.items()):
        found = {row["name"]: row for row in rows if row["backend"] == backend and row["page_size"] == 16}
        places = [j + 0.27 * (i - 1) for j in range(len(SHOWN))]
        shares = [100 * found[name]["fraction"] for name in SHOWN]
        name = {"triton": "Triton", "cuda": "CUDA C++", "torch": "chapter 3"}[backend]
        axes.bar(places, shares, width=0.25, color=tint(theme, color, 0.85), label=name)
        for x, share in zip(places, shares, strict=True):
            label(axes, theme, x, share + 3, f"{share:.0f}", fontsize=7)
    axes.axhline(100, color=NEW, linewidth=1.1, linestyle="--")
    axes.set_xticks(range(len(SHOWN)), list(SHOWN.values()), fontsize=9)
    axes.set_ylim(0, 128)
    axes.set_yticks([0, 25, 50, 75, 100])
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("sequences × keys of each", color=theme.ink)
    legend(axes, theme, loc="upper right", ncols=3, fontsize=8)
    return figure
