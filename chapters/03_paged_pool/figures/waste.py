"""Counted: the share of the memory given out that holds no token, by page size, and the page tables' entries."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.record import load
from chapters.figures import NEW, PAGE, Theme, chart, label, tint


def draw(theme: Theme) -> Figure:
    data = load("ch03_memory")["data"]
    sizes = data["waste"]["many"]["page_size"]
    figure, axes = chart(theme, "", "memory without a token, %", height=3.2)
    names = [f"{s} tokens" if int(s) < data["context"] else "the context" for s in sizes]
    shares = [100 * entry["unused_share"] for entry in sizes.values()]
    contiguous = [int(s) == data["context"] for s in sizes]
    colors = [tint(theme, NEW if last else PAGE, 0.85) for last in contiguous]
    axes.bar(range(len(sizes)), shares, color=colors, width=0.7)
    for x, (share, entry) in enumerate(zip(shares, sizes.values(), strict=True)):
        words = f"{share:.1f} %\n{entry['table_entries']:,} entries"
        label(axes, theme, x, share + 2, words, va="bottom", fontsize=8)
    axes.set_xticks(range(len(sizes)), [name.replace("1 tokens", "1 token") for name in names])
    axes.set_ylim(0, 118)
    axes.set_yticks([0, 25, 50, 75, 100])
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("page of", color=theme.ink)
    return figure
