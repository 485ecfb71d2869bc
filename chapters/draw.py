"""Draws a run of the engine from the trace that `EngineConfig(trace=FILE)` writes.

For notebooks (plain matplotlib axes) and for figure scripts (with their theme). The file's format is described in
`minisgl.engine.trace`; what is drawn is the state after a step was retired.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from chapters.figures import LIGHT, NEW, PAGE, REQUESTS, Theme, tint

Kind = Literal["waiting", "prefill", "decode", "paused", "preempted"]
DONE = {"stop": "■", "length": "■", "abort": "×", "error": "!"}


@dataclass(frozen=True)
class Row:
    """What a request computed in a step: `tokens` tokens from position `start`."""

    start: int
    tokens: int
    cached: int = 0  # tokens before `start` that it found in the prefix cache, in the first step of a run


@dataclass(frozen=True)
class TreeNode:
    """A node of the prefix tree; `parent` is an index into the step's list, -1 for the root."""

    parent: int
    tokens: list[int]  # the first few
    num_tokens: int
    pages: list[int]
    locks: int


@dataclass(frozen=True)
class Step:
    """The engine after one step. `kinds` says what each unfinished request did in it."""

    time: float  # seconds since the trace began
    batch: dict[int, Row]  # by request, in the batch's order
    kinds: dict[int, Kind]
    finished: dict[int, str]  # reasons
    tables: dict[int, list[int]]  # the pages of each running request
    computed: dict[int, int]  # tokens of each running request whose K and V are in its pages
    free: int  # pages
    tree: list[TreeNode]

    @property
    def total_tokens(self) -> int:
        return sum(row.tokens for row in self.batch.values())


@dataclass(frozen=True)
class Trace:
    """A run: the header's fields, and the steps in order."""

    pages: int
    page_size: int
    header: dict[str, Any]
    steps: list[Step] = field(default_factory=list)

    @property
    def requests(self) -> list[int]:
        """Ids in the order in which they were first seen."""
        return list(dict.fromkeys(i for step in self.steps for i in [*step.kinds, *step.finished]))

    def color(self, request: int) -> str:
        """The same colour for a request in every drawing of the run."""
        return REQUESTS[self.requests.index(request) % len(REQUESTS)]


def read_trace(path: str | Path) -> Trace:
    """Read a trace file.

    Raises:
        ValueError: the file is no trace, or its run has not begun.
    """
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    header = json.loads(lines[0]) if lines else {}
    if "page_size" not in header:
        raise ValueError(f"{path} is no trace: write one with EngineConfig(trace={str(path)!r}) and close the engine")
    trace = Trace(header["pages"], header["page_size"], header)
    tables: dict[int, list[int]] = {}
    computed: dict[int, int] = {}
    tree: list[TreeNode] = []
    for line in lines[1:]:
        event = json.loads(line)
        batch: dict[int, Row] = {}
        kinds: dict[int, Kind] = {}
        for request, start, tokens in event["batch"]:
            fresh = request not in computed
            batch[request] = Row(start, tokens, start if fresh else 0)
            kinds[request] = (
                "prefill" if fresh or tokens > 1 else "decode"
            )  # a last chunk of one token passes as decode
            computed[request] = start + tokens
        kinds |= dict.fromkeys(event["waiting"], "waiting") | dict.fromkeys(event["preempted"], "preempted")
        for key, pages in event["tables"].items():
            tables = {**tables, int(key): pages}
        tables = {request: pages for request, pages in tables.items() if pages}
        kinds |= dict.fromkeys((request for request in tables if request not in kinds), "paused")
        computed = {request: computed[request] for request in tables if request in computed}
        tree = [TreeNode(*node) for node in event["tree"]] if "tree" in event else tree
        finished = dict(event["finished"])
        trace.steps.append(Step(event["time"], batch, kinds, finished, tables, dict(computed), event["free"], tree))
    return trace


def timeline(
    trace: Trace,
    ax: Axes,
    theme: Theme = LIGHT,
    by: Literal["step", "tokens", "time"] = "step",
    names: Callable[[int], str] = str,
    key: bool = True,
) -> None:
    """One line a request, one column a step: what each did when.

    A prefill or chunk is dark and shows its number of tokens; 32+7 means that 32 more were found in the prefix cache.

    Args:
        by: how wide a step is: all alike, by its tokens, or by its seconds.
        names: what to call a request, from its id.
        key: explain the shades below.
    """
    requests, edges = trace.requests, _edges(trace, by)
    width = edges[-1] - edges[0] or 1
    apart = 0.8 if len(trace.steps) <= 80 else 0  # lines between the cells, as long as there is room
    for y, request in enumerate(requests):
        color = trace.color(request)
        for kind, first, last in _runs(trace, request):
            x, length = edges[first], edges[last + 1] - edges[first]
            if kind in ("prefill", "decode"):
                shade = tint(theme, color, 0.95 if kind == "prefill" else 0.4)
                place = {"facecolor": shade, "edgecolor": theme.paper, "linewidth": apart}
                ax.add_patch(Rectangle((x, y - 0.4), length, 0.8, **place))
            if kind == "prefill":
                _note(ax, x + length / 2, y, trace.steps[first].batch[request], length / width)
            elif kind == "paused":
                ax.add_patch(Rectangle((x, y - 0.08), length, 0.16, facecolor=tint(theme, color, 0.4), linewidth=0))
            elif kind == "waiting":
                ax.plot([x, x + length], [y, y], color=theme.muted, linewidth=1, linestyle=(0, (1, 2)))
            elif kind == "preempted":
                ax.plot([x, x + length], [y, y], color=NEW, linewidth=1.5, linestyle=(0, (3, 2)))
        for i, step in enumerate(trace.steps):
            if request in step.finished:
                mark = DONE[step.finished[request]]
                ax.annotate(
                    mark, (edges[i + 1], y), (3, 0), textcoords="offset points", va="center", color=color, fontsize=8
                )
    _bare(ax, theme)
    ax.set_xlim(edges[0], edges[-1] + 0.03 * width)
    ax.set_ylim(len(requests) - 0.4, -0.6)
    ax.set_yticks(range(len(requests)), [names(request) for request in requests])
    ax.set_ylabel("request", color=theme.ink)
    ax.set_xlabel({"step": "step", "tokens": "tokens computed", "time": "seconds"}[by], color=theme.ink)
    if key:
        grey = theme.muted
        handles = [
            Patch(facecolor=tint(theme, grey, 0.95), label="prefill"),
            Patch(facecolor=tint(theme, grey, 0.4), label="decode"),
            *ax.plot([], [], color=tint(theme, grey, 0.4), linewidth=3, label="paused"),
            *ax.plot([], [], color=grey, linewidth=1, linestyle=(0, (1, 2)), label="waiting"),
            *ax.plot([], [], color=NEW, linewidth=1.5, linestyle=(0, (3, 2)), label="preempted"),
            *ax.plot([], [], color=grey, linestyle="", marker="s", markersize=4, label="finished"),
        ]
        seen = {kind for step in trace.steps for kind in step.kinds.values()} | {"finished"}
        _key(ax, theme, [handle for handle in handles if handle.get_label() in seen])


def pool_grid(
    trace: Trace,
    step: int,
    ax: Axes,
    theme: Theme = LIGHT,
    columns: int = 16,
    numbers: bool = False,
    names: Callable[[int], str] = str,
    key: bool = True,
) -> None:
    """The pool after a step: a square a page, in the colours of the requests that hold it, as full as it is.

    Args:
        step: an index into trace.steps; -1 is the last.
        columns: pages in a line.
        numbers: write each page's number into it.
        names: what to call a request, from its id.
        key: explain the colours below.
    """
    now = trace.steps[step]
    owners, filled, cached = _holders(trace, now)
    rows = -(-trace.pages // columns)
    for page in range(1, trace.pages + 1):
        y, x = divmod(page - 1, columns)
        colors = [trace.color(request) for request in owners.get(page, [])]
        _page(ax, theme, x, y, colors, filled.get(page, 1.0), page in cached)
        if numbers:
            ax.text(x + 0.46, y + 0.47, str(page), ha="center", va="center", fontsize=6, color=theme.ink)
    _blank(ax)
    ax.set(xlim=(-0.1, columns), ylim=(rows + 0.05, -0.15), aspect="equal")
    if key:
        handles = _request_key(trace, now, theme, names) + _page_key(theme, bool(cached), now.free > 0)
        _key(ax, theme, handles)


def radix_tree(
    trace: Trace,
    step: int,
    ax: Axes,
    theme: Theme = LIGHT,
    text: Callable[[list[int]], str] | None = None,
    names: Callable[[int], str] = str,
    most_pages: int = 12,
    key: bool = True,
) -> None:
    """The prefix tree after a step, from left to right: a node is its run of pages, in the colours of their holders.

    Args:
        step: an index into trace.steps; -1 is the last.
        text: makes a label of a node's first tokens, such as tokenizer.decode; the ids are shown without it.
        names: what to call a request, from its id.
        most_pages: longer nodes are drawn this long and say how many pages they have.
        key: explain the colours below.
    """
    now = trace.steps[step]
    owners, _, _ = _holders(trace, now)
    left, end, line = _layout(now.tree, most_pages, ax.bbox.width / ax.bbox.height)
    right, height = max(end.values()) + 1.2, 2 * max(line.values()) + 2
    middle = {i: 2 * y + 0.46 for i, y in line.items()}
    scale = min(ax.bbox.width / right, ax.bbox.height / height) * 72 / ax.figure.dpi  # points a page
    _blank(ax)
    ax.set(xlim=(-0.2, right - 0.2), ylim=(height - 0.9, -0.9), aspect="equal")
    ax.plot([0.15], [middle[-1]], marker="o", color=theme.muted, markersize=6)
    for i, node in enumerate(now.tree):
        x, y, fork = left[i], middle[i] - 0.46, left[i] - 0.6
        path = [end[node.parent], fork, fork, x - 0.1], [middle[node.parent]] * 2 + [middle[i]] * 2
        ax.plot(*path, color=theme.muted, linewidth=1, zorder=0)
        for j, page in enumerate(node.pages[:most_pages]):
            colors = [trace.color(request) for request in owners.get(page, [])]
            _page(ax, theme, x + j, y, colors, 1.0, True)
        free = min((left[j] for j, child in enumerate(now.tree) if child.parent == i), default=right) - x - 0.2
        room = int(free * scale / 4.2)  # letters, at 7 points
        note = f" ({len(node.pages)} pages)" if len(node.pages) > most_pages else ""
        words = _label(node, text, max(room - len(note), 3)) + note
        ax.text(x, y - 0.12, words, fontsize=7, color=theme.ink, va="bottom", parse_math=False)
        if node.locks:
            ax.text(end[i] + 0.1, y + 0.1, str(node.locks), fontsize=7, color=NEW, va="center", fontweight="bold")
    if key:
        handles = _request_key(trace, now, theme, names) + _page_key(theme, bool(now.tree), False)
        if any(node.locks for node in now.tree):
            handles += ax.plot([], [], linestyle="", marker="$1$", color=NEW, markersize=6, label="locks")
        _key(ax, theme, handles)


def _layout(
    tree: list[TreeNode], most_pages: int, ratio: float
) -> tuple[dict[int, float], dict[int, float], dict[int, float]]:
    """By node, -1 being the root: where it begins and ends, and on which line it lies.

    Args:
        ratio: of the drawing's width to its height; what is left of the width goes between the nodes, for labels.
    """
    children: dict[int, list[int]] = {}
    width = [min(len(node.pages), most_pages) for node in tree] + [0.3]  # [-1] is the root's
    before, level, line = {-1: 0.0}, {-1: 0}, dict[int, float]()
    for i, node in enumerate(tree):  # parents come first
        children.setdefault(node.parent, []).append(i)
        before[i], level[i] = before[node.parent] + width[node.parent], level[node.parent] + 1
    lines = 0

    def place(i: int) -> float:
        nonlocal lines
        below = [place(child) for child in children.get(i, [])]
        lines += not below
        line[i] = (below[0] + below[-1]) / 2 if below else lines - 1.0
        return line[i]

    place(-1)
    room = 2 * lines * ratio - max(before[i] + width[i] for i in before)
    gap = min(max(room / (max(level.values()) + 1), 1.2), 6.0)
    left = {i: before[i] + gap * level[i] for i in before}
    return left, {i: x + width[i] for i, x in left.items()}, line


def _label(node: TreeNode, text: Callable[[list[int]], str] | None, room: int) -> str:
    """The beginning of a node's tokens, in at most about `room` letters."""
    words = text(node.tokens) if text else " ".join(map(str, node.tokens))
    words = words.replace("\n", "\u21b5")
    if len(words) <= room and node.num_tokens == len(node.tokens):
        return words
    cut = words[: room - 1]
    if not text and len(cut) < len(words) and words[len(cut)] != " ":
        cut = cut.rpartition(" ")[0] or cut  # whole ids
    return cut.rstrip() + "…"


def _edges(trace: Trace, by: str) -> list[float]:
    """Where each step begins, and where the last one ends."""
    edges = [0.0]
    for i, step in enumerate(trace.steps):
        edges.append({"step": i + 1.0, "tokens": edges[-1] + step.total_tokens, "time": step.time}[by])
    return edges


def _runs(trace: Trace, request: int) -> Iterator[tuple[Kind, int, int]]:
    """(kind, first step, last step): equal neighbours in one, but a cell of its own for each prefill and decode."""
    before: tuple[Kind, int, int] | None = None
    for i, step in enumerate(trace.steps):
        kind = step.kinds.get(request)
        if before and kind == before[0] and kind not in ("prefill", "decode"):
            before = before[0], before[1], i
            continue
        if before:
            yield before
        before = (kind, i, i) if kind else None
    if before:
        yield before


def _note(ax: Axes, x: float, y: float, row: Row, share: float) -> None:
    """A chunk's size, if it fits into this share of the width."""
    for words in ([f"{row.cached}+{row.tokens}"] if row.cached else []) + [str(row.tokens)]:
        if share > 0.011 * len(words):
            ax.text(x, y, words, ha="center", va="center", fontsize=7, color="#ffffff")
            return


def _holders(trace: Trace, step: Step) -> tuple[dict[int, list[int]], dict[int, float], set[int]]:
    """By page: the requests that hold it, the share of it that is written; and the pages that the tree holds."""
    owners: dict[int, list[int]] = {}
    filled: dict[int, float] = {}
    for request, pages in step.tables.items():
        for i, page in enumerate(pages):
            owners.setdefault(page, []).append(request)
            tokens = step.computed.get(request, 0) - i * trace.page_size
            filled[page] = max(filled.get(page, 0.0), min(max(tokens / trace.page_size, 0.0), 1.0))
    cached = {page for node in step.tree for page in node.pages}
    return owners, filled | dict.fromkeys(cached, 1.0), cached


def _page(ax: Axes, theme: Theme, x: float, y: float, colors: Sequence[str], filled: float, cached: bool) -> None:
    """One page in a unit square: a band for each holder, pale where nothing is written yet, hatched if in the tree."""
    size = 0.92
    for i, color in enumerate(colors or ([PAGE] if cached else [])):
        corner, height = (x, y + i * size / max(len(colors), 1)), size / max(len(colors), 1)
        ax.add_patch(Rectangle(corner, size, height, facecolor=tint(theme, color, 0.2), linewidth=0))
        strength = 0.85 if colors else 0.35
        ax.add_patch(Rectangle(corner, size * filled, height, facecolor=tint(theme, color, strength), linewidth=0))
    if cached:
        look = {"fill": False, "edgecolor": theme.ink, "linewidth": 0.0, "hatch": "////", "alpha": 0.35}
        ax.add_patch(Rectangle((x, y), size, size, **look))
    edge = theme.ink if cached else theme.muted if colors else theme.faint
    ax.add_patch(Rectangle((x, y), size, size, fill=False, edgecolor=edge, linewidth=0.8))


def _request_key(trace: Trace, step: Step, theme: Theme, names: Callable[[int], str]) -> list[Any]:
    """The running requests, as long as each has a colour of its own."""
    if len(step.tables) > len(REQUESTS):
        return []
    return [Patch(facecolor=tint(theme, trace.color(i), 0.85), label=names(i)) for i in step.tables]


def _page_key(theme: Theme, cached: bool, free: bool) -> list[Any]:
    handles = []
    if cached:
        look = {"edgecolor": theme.muted, "hatch": "////", "linewidth": 0.8}
        handles.append(Patch(facecolor="none", label="in the prefix tree", **look))
        handles.append(Patch(facecolor=tint(theme, PAGE, 0.35), label="only there", **look))
    if free:
        handles.append(Patch(facecolor="none", edgecolor=theme.faint, linewidth=0.8, label="free"))
    return handles


def _key(ax: Axes, theme: Theme, handles: Sequence[Any]) -> None:
    look = {"frameon": False, "labelcolor": theme.ink, "fontsize": 8, "handlelength": 1.4, "columnspacing": 1.2}
    below = -34 / (ax.get_window_extent().height or 1) if ax.axison else -0.01  # clear of the axis's label
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, below), ncols=7, borderaxespad=0.2, **look)


def _bare(ax: Axes, theme: Theme) -> None:
    """Axes that stand back: no frame but the lower line."""
    ax.patch.set_alpha(0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color(theme.muted)
    ax.tick_params(colors=theme.muted, labelcolor=theme.ink, labelsize=8)
    ax.tick_params(axis="y", length=0)


def _blank(ax: Axes) -> None:
    ax.patch.set_alpha(0)
    ax.axis("off")
