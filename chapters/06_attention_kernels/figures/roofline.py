"""Measured: each attention kernel as a point under the roof of the GPU that ran it."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.record import load
from chapters.figures import NEW, PAGE, WEIGHTS, K, Q, Theme, chart, label, legend

COLORS = {"triton": Q, "cuda": K, "torch": PAGE}
NAMES = {"triton": "Triton", "cuda": "CUDA C++", "torch": "chapter 3: gather, then attend"}


def draw(theme: Theme) -> Figure:
    data = load("ch06_attention")["data"]
    copy, peak, shape = data["limits"]["copy_tb_s"], data["limits"]["matmul_tflop_s"], data["shape"]
    figure, axes = chart(theme, "operations for each byte that must be moved", "TFLOP/s", height=4.0)
    corner, right = peak / copy, 4 * peak / copy
    axes.plot([0.5, corner, right], [0.5 * copy, peak, peak], color=theme.muted, linewidth=1.4)
    label(axes, theme, 6, 6 * copy * 1.35, f"{copy:.2f} TB/s", rotation=34, fontsize=8, color=theme.muted)
    label(axes, theme, right, peak * 1.25, f"{peak:.0f} TFLOP/s", ha="right", fontsize=8, color=theme.muted)
    per_key = 4 * shape["heads"] * shape["head_dim"]  # two products
    kv_bytes = 2 * 2 * shape["kv_heads"] * shape["head_dim"]
    named = set()
    spread = {"triton": 1.0, "cuda": 1.12, "torch": 1.0}  # sideways, so that points do not cover each other
    for row in data["decode"]:
        if row["page_size"] != 16:
            continue
        keys = row["bytes"] / kv_bytes  # q and the result are a thousandth
        rate, x = per_key * keys / row["us"] / 1e6, per_key / kv_bytes * spread[row["backend"]]
        name = None if row["backend"] in named else NAMES[row["backend"]]
        named.add(row["backend"])
        axes.plot([x], [rate], "o", color=COLORS[row["backend"]], markersize=6, alpha=0.8, label=name)
    below = 0.0
    for row in data["cuda_ladder"][:-1]:
        x, rate = per_key / kv_bytes * 1.3, per_key / kv_bytes * row["tb_s"]
        axes.plot([x], [rate], "s", color=K, markersize=4, alpha=0.6)
        close = rate < 1.3 * below  # beside the step before, whose label stands there
        label(axes, theme, x * (1.25 if close else 1.1), rate, str(row["step"]), ha="left", fontsize=7, color=K)
        below = rate
    for row in data["prefill"]:
        if "failed" in row or row["page_size"] == 256:
            continue
        tokens = 8 * 2048
        moved = 2 * tokens * shape["head_dim"] * (2 * shape["heads"] + 2 * shape["kv_heads"])  # q, k, v and the result
        marker, color = ("o", Q) if row["backend"] == "triton" else ("D", WEIGHTS if "cudnn" in row["backend"] else NEW)
        name = None if row["backend"] == "triton" else row["backend"].replace("sdpa_", "torch's attention: ")
        axes.plot([row["flops"] / moved], [row["tflop_s"]], marker, color=color, markersize=6, label=name)
    label(axes, theme, per_key / kv_bytes, 0.1, "decode", fontsize=9, color=theme.muted)
    label(axes, theme, row["flops"] / moved, 90, "prefill of 2,048", fontsize=9, color=theme.muted)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(0.06, 2.2 * peak)
    legend(axes, theme, loc="lower right", fontsize=8)
    return figure
