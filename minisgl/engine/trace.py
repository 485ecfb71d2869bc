"""Writes what each step did, one JSON object a line, for notebooks to plot and pages to replay.

Built for small runs that somebody will look at: it compares whole page tables and trees with those of the step before.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from minisgl.core import Batch, Request
from minisgl.kvcache.radix_cache import Node
from minisgl.scheduler.scheduler import Scheduler


class Trace:
    """One event a step:

    - step, time: its number from 0, and seconds since the trace began.
    - batch: [request id, position of the first token computed, number of tokens] of each row.
    - waiting, preempted: ids in the queue; those that ran before and lost their pages are in `preempted`.
    - finished: [id, reason].
    - tables: the page tables that changed, by request id; an empty one was given back.
    - free: free pages.
    - tree: if it changed, its nodes from the root down: [parent's index, first tokens, number of tokens, pages, locks].

    The first line is a header: the number of usable pages, and the config.

    Args:
        to: a file, or a function that takes each line.
        every_s: leave out steps that follow an event sooner than this; the one after which nobody runs is kept. What
            changed meanwhile stands in the next event, but for the batches.
    """

    def __init__(self, to: str | Callable[[str], object], scheduler: Scheduler, every_s: float = 0.0) -> None:
        self.scheduler, self.steps, self.start = scheduler, 0, time.perf_counter()
        # A line at a time: whoever looks at the file while it grows sees whole events.
        self._file = Path(to).open("w", buffering=1) if isinstance(to, str) else None  # noqa: SIM115 - see close()
        self._put: Callable[[str], object] = self._file.write if self._file else to  # type: ignore[assignment]
        self._every_s, self._due, self._ended = every_s, self.start, list[Request]()
        self._tables: dict[int, list[int]] = {}
        self._tree: list[Any] = []
        self._write({"pages": scheduler.cache.pages.capacity} | asdict(scheduler.config))

    def write(self, batch: Batch | None, ended: list[Request]) -> None:
        """Record a step that has been planned (without overlap it is over), and the requests that ended since the one
        before."""
        scheduler, now = self.scheduler, time.perf_counter()
        self.steps += 1
        self._ended += ended
        if now < self._due and scheduler.has_work:
            return
        tables = {request.id: list(request.pages) for request in scheduler.running}
        changed = {i: pages for i, pages in tables.items() if self._tables.get(i) != pages}
        changed |= {i: [] for i in self._tables if i not in tables}
        event: dict[str, Any] = {
            "step": self.steps - 1,
            "time": round(now - self.start, 6),
            "batch": [[request.id, start, n] for request, start, n in batch or ()],
            "waiting": [request.id for request in scheduler.waiting if not request.preemptions],
            "preempted": [request.id for request in scheduler.waiting if request.preemptions],
            "finished": [[request.id, request.finish_reason] for request in self._ended],
            "tables": changed,
            "free": scheduler.cache.pages.num_free,
        }
        tree = _nodes(scheduler.cache.prefix.root)
        if tree != self._tree:
            event["tree"] = self._tree = tree
        self._tables, self._ended, self._due = tables, [], now + self._every_s
        self._write(event)

    def close(self) -> None:
        if self._file:
            self._file.close()

    def _write(self, event: dict[str, Any]) -> None:
        self._put(json.dumps(event) + "\n")


class Traces(dict[str, Trace]):
    """Those that an engine writes, by name."""

    def write(self, batch: Batch | None, ended: list[Request]) -> None:
        """See Trace.write."""
        for trace in self.values():
            trace.write(batch, ended)

    def close(self) -> None:
        """No more events."""
        for trace in self.values():
            trace.close()
        self.clear()


def _nodes(root: Node) -> list[Any]:
    nodes: list[Any] = []
    queue = [(-1, node) for node in root.children.values()]
    for parent, node in queue:  # grows while it is walked: breadth first
        queue += [(len(nodes), child) for child in node.children.values()]
        nodes.append([parent, node.tokens[:8], len(node.tokens), list(node.pages), node.locks])
    return nodes
