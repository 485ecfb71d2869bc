"""The look of every drawing, and the command that makes them.

A figure is a script `figures/<name>.py` beside its page with `draw(theme) -> Figure`. It is drawn once a theme, as
`<name>-light.svg` and `<name>-dark.svg`. Backgrounds are transparent; text stays text, in the reader's own font.
"""

from __future__ import annotations

import argparse
import re
import runpy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

CHAPTERS = Path(__file__).resolve().parent

# One colour for one thing, in every figure and notebook.
Q, K, V = "#3f83dd", "#e08a2e", "#2fa273"
NEW = "#dc4c64"  # what this step computes or what is being pointed at
WEIGHTS = "#8d74d6"
PAGE = "#6f8fa8"
REQUESTS = ("#3f83dd", "#e08a2e", "#2fa273", "#c25fb2", "#b5a030", "#3aa6b9")


@dataclass(frozen=True)
class Theme:
    """The greys, which change with the page; the palette above does not."""

    name: str
    ink: str  # text
    muted: str  # secondary text, arrows, axes
    faint: str  # grid lines, empty cells
    paper: str  # the page behind


LIGHT = Theme("light", ink="#1f2933", muted="#64717f", faint="#dde2e8", paper="#ffffff")
DARK = Theme("dark", ink="#e4e8ee", muted="#9aa5b3", faint="#3a414d", paper="#1e2129")
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'Noto Sans CJK SC', sans-serif"
STYLE = {"font.family": "DejaVu Sans", "font.size": 10, "svg.fonttype": "none", "svg.hashsalt": "minisgl"}


def tint(theme: Theme, color: str, strength: float = 0.25) -> str:
    """The colour mixed into the page behind: a fill on which text stays readable."""
    mixed = [strength * c + (1 - strength) * p for c, p in zip(to_rgb(color), to_rgb(theme.paper), strict=True)]
    return to_hex(mixed)


def diagram(width: float = 7.0, height: float = 3.0) -> tuple[Figure, Axes]:
    """An empty sheet: one unit is one inch, the origin is at the bottom left."""
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def chart(theme: Theme, xlabel: str, ylabel: str, width: float = 7.0, height: float = 3.4) -> tuple[Figure, Axes]:
    """Axes for data: two spines, a faint grid, labels."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(theme.muted)
    axes.tick_params(colors=theme.muted, labelcolor=theme.ink)
    axes.grid(color=theme.faint, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel(xlabel, color=theme.ink)
    axes.set_ylabel(ylabel, color=theme.ink)
    return figure, axes


def bar_axes(axes: Axes, theme: Theme, xlabel: str) -> None:
    """Dress axes of horizontal bars: each has its name, so the y axis needs no ticks."""
    axes.set_xlabel(xlabel, color=theme.ink)
    axes.patch.set_alpha(0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(theme.muted)
    axes.tick_params(axis="y", length=0, labelcolor=theme.ink)
    axes.tick_params(axis="x", color=theme.muted, labelcolor=theme.muted)


def legend(axes: Axes, theme: Theme, **options: object) -> None:
    """A legend without a frame, from the labels of what was plotted."""
    axes.legend(frameon=False, labelcolor=theme.ink, **options)


def label(axes: Axes, theme: Theme, x: float, y: float, text: str, **options: object) -> None:
    """Text, centred on (x, y) unless ha or va says otherwise."""
    axes.text(x, y, text, **{"ha": "center", "va": "center", "color": theme.ink} | options)


def box(
    axes: Axes, theme: Theme, x: float, y: float, width: float, height: float, text: str = "", color: str = ""
) -> None:
    """A rounded box whose bottom left corner is (x, y); without a colour it is grey."""
    edge = color or theme.muted
    shape = FancyBboxPatch(
        (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.06", facecolor=tint(theme, edge), edgecolor=edge
    )
    axes.add_patch(shape)
    label(axes, theme, x + width / 2, y + height / 2, text)


def arrow(axes: Axes, theme: Theme, start: tuple[float, float], end: tuple[float, float], color: str = "") -> None:
    """A thin arrow from start to end."""
    style = {"arrowstyle": "-|>", "mutation_scale": 9, "linewidth": 1.1, "shrinkA": 2, "shrinkB": 2}
    axes.add_patch(FancyArrowPatch(start, end, color=color or theme.muted, **style))


def cells(axes: Axes, theme: Theme, x: float, y: float, rows: Sequence[Sequence[str]], size: float = 0.25) -> None:
    """A grid of squares whose top left corner is (x, y); each entry is a colour, "" is an empty cell."""
    for i, row in enumerate(rows):
        for j, color in enumerate(row):
            fill = tint(theme, color, 0.75) if color else "none"
            corner = (x + j * size, y - (i + 1) * size)
            axes.add_patch(Rectangle(corner, size, size, facecolor=fill, edgecolor=theme.faint, linewidth=0.8))


def scripts() -> list[Path]:
    """All figure scripts: of the home page and of each folder under chapters/."""
    return sorted([*CHAPTERS.glob("figures/*.py"), *CHAPTERS.glob("*/figures/*.py")])


def render(script: Path, theme: Theme) -> str:
    """The SVG that a script draws in a theme."""
    draw: Callable[[Theme], Figure] = runpy.run_path(str(script))["draw"]
    with matplotlib.rc_context(STYLE), StringIO() as svg:
        draw(theme).savefig(svg, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        text = svg.getvalue().replace("'DejaVu Sans'", FONT)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def same(old: str, new: str) -> bool:
    """Whether two drawings look alike: numbers may differ in the last digits from machine to machine."""

    def parts(svg: str) -> tuple[list[str], list[float]]:
        svg = re.sub(r'(?<=[#"])[a-z][0-9a-f]{10}(?=[")])', "id", svg)  # ids are hashes of coordinates
        number = r"-?\d+\.\d+(?:e-?\d+)?|-?\d+"
        return re.split(number, svg), [float(n) for n in re.findall(number, svg)]

    (old_text, old_numbers), (new_text, new_numbers) = parts(old), parts(new)
    return old_text == new_text and all(abs(a - b) < 0.01 for a, b in zip(old_numbers, new_numbers, strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    """Draw every figure whose script or data changed; with --check, only say which."""
    parser = argparse.ArgumentParser(prog="python -m chapters figures", description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a figure is stale")
    check = parser.parse_args(argv).check
    stale = undrawn = 0
    for script in scripts():
        for theme in (LIGHT, DARK):
            path = script.with_name(f"{script.stem}-{theme.name}.svg")
            try:
                svg = render(script, theme)
            except FileNotFoundError as error:  # of a result
                print(f"not drawn: {path.relative_to(CHAPTERS.parent)} needs {error.filename}")
                undrawn += 1
                continue
            if path.exists() and same(path.read_text(encoding="utf-8"), svg):
                continue
            stale += 1
            print(f"{'stale' if check else 'drawn'}: {path.relative_to(CHAPTERS.parent)}")
            if not check:
                path.write_text(svg, encoding="utf-8")
    if not stale + undrawn:
        print("all figures are up to date")
    elif check and stale:
        print(f"{stale} stale: run `python -m chapters figures`")
    return int(undrawn > 0 or (check and stale > 0))
