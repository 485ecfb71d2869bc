"""What the last runs of the reader's files showed, kept in workspace/progress.json."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from chapters import workspace
from chapters.manifest import Chapter, Task

STYLES = {
    "done": "green",
    "failing": "red",
    "partly run": "yellow",
    "changed": "yellow",
    "not run": "yellow",
    "not started": "dim",
}


def record(root: Path, outcomes: Mapping[str, str], digests: Mapping[str, str]) -> None:
    """Remember "done", "failing" or "partly run" for these tasks, and the digest of what was tested."""
    _save(root, _load(root) | {task_id: [state, digests[task_id]] for task_id, state in outcomes.items()})


def forget(root: Path, chapter: Chapter) -> None:
    """Forget all of a chapter's outcomes."""
    ids = {task.id for task in chapter.tasks}
    _save(root, {task_id: entry for task_id, entry in _load(root).items() if task_id not in ids})


def states(root: Path, chapter: Chapter) -> dict[str, str]:
    """One of STYLES for each of the chapter's tasks."""
    if not workspace.is_started(root, chapter):
        return {task.id: "not started" for task in chapter.tasks}
    known = _load(root)
    found = {}
    for task_id, digest in workspace.digests(root, chapter).items():
        state, tested = known.get(task_id, ["not run", digest])
        found[task_id] = state if tested == digest else "changed"
    return found


def next_task(root: Path, chapter: Chapter) -> Task | None:
    """The first task that is not done."""
    now = states(root, chapter)
    return next((task for task in chapter.tasks if now[task.id] != "done"), None)


def advice(root: Path, chapters: Sequence[Chapter], chapter: Chapter) -> str:
    """What to do after working on this chapter."""
    if task := next_task(root, chapter):
        return (
            f"next: {task.id} {task.title}\n  pytest {' '.join(task.tests)} --mine\n  python -m chapters hint {task.id}"
        )
    after = next((c for c in chapters if c.number > chapter.number), None)
    then = f", then python -m chapters start {after.number}" if after else ""
    return f"chapter {chapter.number} is done: python -m chapters run {chapter.number} chat{then}"


def table(root: Path, chapters: Sequence[Chapter]) -> Table:
    """Chapters down, tasks across."""
    grid = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    grid.add_column("chapter", no_wrap=True)
    for number in range(1, max((len(chapter.tasks) for chapter in chapters), default=0) + 1):
        grid.add_column(f".{number}")
    for chapter in chapters:
        cells = (f"[{STYLES[state]}]{state}[/]" for state in states(root, chapter).values())
        grid.add_row(chapter.name.replace("_", " ", 1), *cells)
    return grid


def _path(root: Path) -> Path:
    return root / "workspace" / "progress.json"


def _load(root: Path) -> dict[str, list[str]]:
    path = _path(root)
    known: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return known


def _save(root: Path, outcomes: Mapping[str, list[str]]) -> None:
    path = _path(root)
    path.parent.mkdir(exist_ok=True)
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(outcomes, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    scratch.replace(path)
