"""One layer as a chain of reads and writes, by torch's ops and by fused ones; bytes a token on each arrow. Counted."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.ch07_layer import PRODUCTS
from benchmarks.record import load
from chapters.figures import NEW, WEIGHTS, K, Theme, arrow, box, diagram, label

TOKENS = 16384
NAMES = {
    "add_rms_norm": "add, norm",
    "rms_norm": "norm",
    "cat": "join q and k",
    "apply_rope": "rotate",
    "store": "store K, V",
    "silu_and_mul": "silu, times up",
    "qk_norm_rope_store": "norms, rotate, store",
}
NAMES |= {name: f"product: {name.removesuffix('_proj')}" for name in PRODUCTS}
STEP, HEIGHT, BOX = 0.41, 0.3, 1.75  # inches: from row to row, of a box, and across
TOP = 5.75


def draw(theme: Theme) -> Figure:
    steps = load("ch07_layer")["data"]["steps"][str(TOKENS)]
    figure, axes = diagram(7.6, 6.4)
    rows = len(steps["torch"]["ops"])
    for name, x, title in (("torch", 0.95, "torch's ops"), ("fused", 4.85, "fused ops")):
        way, place = steps[name], 0.0
        text = f"{title}: {way['kernels']} kernels, {way['bytes'] / TOKENS / 1024:.0f} KiB a token"
        label(axes, theme, x + BOX / 2, TOP + 0.5, text, weight="bold", fontsize=9.5)
        label(axes, theme, x - 0.42, TOP + 0.2, "read", color=theme.muted, fontsize=8)
        label(axes, theme, x + BOX + 0.42, TOP + 0.2, "written", color=theme.muted, fontsize=8)
        for op in way["ops"]:
            span = 5 if op["op"] == "qk_norm_rope_store" else 1  # stands for five of torch's
            row(axes, theme, x, TOP - STEP * (place + (span - 1) / 2), op)
            place += span
        axes.plot([x + BOX / 2] * 2, [TOP + 0.12, TOP - STEP * rows + 0.1], color=theme.faint, zorder=0)
    note = "KiB a token at 16,384 tokens, weights read once; 9× are nine kernels. Norms, rotation and activation shrink"
    label(axes, theme, 3.8, 0.12, note, color=theme.muted, fontsize=8)
    return figure


def row(axes: Axes, theme: Theme, x: float, y: float, op: dict[str, Any]) -> None:
    """A box with its number of kernels, and what it reads and writes."""
    product = op["op"] in PRODUCTS
    color = WEIGHTS if product else K if op["op"] == "attention" else NEW
    name = NAMES.get(op["op"], op["op"])
    box(axes, theme, x, y - HEIGHT / 2, BOX, HEIGHT, color=color)
    label(axes, theme, x + 0.08, y - 0.01, name, ha="left", fontsize=8.5)
    times = f"{op['kernels']}×" if op["kernels"] > 1 else ""
    label(axes, theme, x + BOX - 0.06, y - 0.01, times, ha="right", fontsize=8, color=theme.muted)
    for start, bytes_ in ((x - 0.72, op["read"]), (x + BOX, op["written"])):
        arrow(axes, theme, (start, y - 0.06), (start + 0.72, y - 0.06), "" if product else color)
        look = {"fontsize": 8, "color": theme.muted if product else theme.ink}
        label(axes, theme, start + 0.36, y + 0.07, f"{bytes_ / TOKENS / 1024:.1f}", **look)
