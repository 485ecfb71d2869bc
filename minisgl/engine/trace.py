"""Writes what each step did, one JSON object a line, for notebooks to plot and pages to replay.

Built for small runs that somebody will look at: it compares whole page tables and trees with those of the step before.
"""

import json
import time
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
    """

    def __init__(self, path: str, scheduler: Scheduler) -> None:
        self.scheduler, self.steps, self.start = scheduler, 0, time.perf_counter()
        self._file = Path(path).open("w")  # noqa: SIM115 - closed by close()
        self._tables: dict[int, list[int]] = {}
        self._tree: list[Any] = []
        self._write({"pages": scheduler.cache.pages.capacity} | asdict(scheduler.config))

    def write(self, batch: Batch | None, ended: list[Request]) -> None:
        """Record a step that has been planned (without overlap it is over), and the requests that ended since the one
        before."""
        scheduler = self.scheduler
        tables = {request.id: list(request.pages) for request in scheduler.running}
        changed = {i: pages for i, pages in tables.items() if self._tables.get(i) != pages}
        changed |= {i: [] for i in self._tables if i not in tables}
        event: dict[str, Any] = {
            "step": self.steps,
            "time": round(time.perf_counter() - self.start, 6),
            "batch": [[request.id, start, n] for request, start, n in batch or ()],
            "waiting": [request.id for request in scheduler.waiting if not request.preemptions],
            "preempted": [request.id for request in scheduler.waiting if request.preemptions],
            "finished": [[request.id, request.finish_reason] for request in ended],
            "tables": changed,
            "free": scheduler.cache.pages.num_free,
        }
        tree = _nodes(scheduler.cache.prefix.root)
        if tree != self._tree:
            event["tree"] = self._tree = tree
        self._tables = tables
        self.steps += 1
        self._write(event)

    def close(self) -> None:
        self._file.close()

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()  # whoever looks at it while it runs sees whole steps


def _nodes(root: Node) -> list[Any]:
    nodes: list[Any] = []
    queue = [(-1, node) for node in root.children.values()]
    for parent, node in queue:  # grows while it is walked: breadth first
        queue += [(len(nodes), child) for child in node.children.values()]
        nodes.append([parent, node.tokens[:8], len(node.tokens), list(node.pages), node.locks])
    return nodes
