"""Each op as a point under the roof: with torch's kernels, and fused. Bytes are counted, times measured."""

from __future__ import annotations

from collections.abc import Iterator

from matplotlib.figure import Figure

from benchmarks.record import load
from chapters.figures import NEW, REQUESTS, WEIGHTS, K, Theme, V, chart, legend

TOKENS = 16384
# Operations for each element that is read, about: what counts is how far a point lies to the left of the bend.
PER_ELEMENT = {"add_rms_norm": 3, "silu_and_mul": 3, "qk_norm_rope_store": 6}  # of x and residual; gate and up; q, k, v
PARTS = {
    "add_rms_norm": ["add_rms_norm"],
    "silu_and_mul": ["silu_and_mul"],
    "qk_norm_rope_store": ["rms_norm", "cat", "apply_rope", "store"],
}
COLORS = {"add_rms_norm": V, "silu_and_mul": K, "qk_norm_rope_store": REQUESTS[0]}


def points() -> Iterator[tuple[str, str, float, float, float, float, float]]:
    """Name, colour, operations, bytes before and after, microseconds before and after."""
    fused, layer = load("ch07_fused")["data"], load("ch07_layer")["data"]["steps"][str(TOKENS)]
    for op, parts in PARTS.items():
        row = next(r for r in fused["ops"] if (r["op"], r["tokens"], r["shape"]) == (op, TOKENS, "qwen3-0.6b"))
        rows = [r for r in layer["torch"]["ops"] if r["op"] in parts]
        if op == "add_rms_norm":
            rows = rows[:1]  # a layer has two
        after = next(r for r in layer["fused"]["ops"] if r["op"] == op)
        operations = PER_ELEMENT[op] * after["read"] / 2
        before = sum(r["read"] + r["written"] for r in rows)
        yield op, COLORS[op], operations, before, after["read"] + after["written"], row["eager_us"], row["us"]
    for row in fused["fuser"]:
        name = f"norm, product, silu: {row['tokens']:,} tokens"
        sizes = (row["flops"], row["composed_bytes"], row["fused_bytes"], row["eager_us"], row["us"])
        yield name, NEW if row["tokens"] == TOKENS else WEIGHTS, *sizes


def draw(theme: Theme) -> Figure:
    limits = load("ch07_fused")["data"]["limits"]
    bandwidth, peak = limits["copy_tb_s"], limits["matmul_tflop_s"]  # TB/s times operations a byte are TFLOP/s
    figure, axes = chart(theme, "operations a byte", "TFLOP/s", width=7.4, height=4.2)
    bend, end = peak / bandwidth, 3000
    axes.plot([0.03, bend, end], [0.03 * bandwidth, peak, peak], color=theme.ink, linewidth=1.4)
    for name, color, operations, before, after, eager_us, us in points():
        old = operations / before, operations / eager_us / 1e6
        new = operations / after, operations / us / 1e6
        axes.annotate("", new, old, arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 1.2})
        axes.plot(*old, marker="o", markersize=7, markerfacecolor=theme.paper, color=color, linestyle="none")
        axes.plot(*new, marker="o", markersize=7, color=color, linestyle="none", label=name)
    axes.set(xscale="log", yscale="log", xlim=(0.03, end), ylim=(0.02, 2 * peak))
    legend(axes, theme, fontsize=8, loc="lower right")
    axes.text(0.04, 0.35 * peak, "hollow: torch\nfilled: fused", color=theme.muted, fontsize=9)
    return figure
