"""What the last runs of the reader's files showed and how long they took, kept in workspace/progress.json; `status`.

A task's id has its last outcome. "time" has what can be known of the reader's time: the course's commands (`start`,
`hint`, `solution`, `run`, `reset`, `pytest --mine`) leave a mark, and the gap before a mark belongs to its chapter. A
pause cannot be told from a long thought, so a gap counts for MOST_OF_A_GAP_S at most; the time before `start` and after
the last test is not known. Files of before there was a "time" are read as they are.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape

from chapters import workspace
from chapters.manifest import Chapter, Task

STATES = {  # a state's style and its sign on the map
    "done": ("green", "✓"),
    "failing": ("red", "✗"),
    "partly run": ("yellow", "~"),
    "changed": ("yellow", "~"),
    "not run": ("yellow", "o"),
    "not started": ("dim", "·"),
}
LEGEND = {"~": "changed since its test, or partly tested", "o": "not tested", "·": "not started"}
MOST_OF_A_GAP_S = 20 * 60
WIDE = 68  # columns from which the map has its planned minutes, and full titles


def record(root: Path, outcomes: Mapping[str, str], digests: Mapping[str, str], now: float | None = None) -> None:
    """Remember "done", "failing" or "partly run" for these tasks, and the digest of what was tested.

    Args:
        digests: of all tasks of one chapter, by id.
        now: seconds since 1970; now, unless given.
    """
    known = _marked(_load(root), {int(task_id.partition(".")[0]) for task_id in digests}, now)
    _save(root, known | {task_id: [state, digests[task_id]] for task_id, state in outcomes.items()})


def mark(root: Path, chapter: Chapter, begins: bool = False, now: float | None = None) -> None:
    """Note that the reader works on a started chapter; with `begins`, the time before counts for none."""
    if workspace.is_started(root, chapter):
        _save(root, _marked(_load(root), set() if begins else {chapter.number}, now))


def minutes(root: Path, chapter: Chapter) -> int:
    """What is known of the time spent on a chapter."""
    return round(_load(root).get("time", {}).get("seconds", {}).get(str(chapter.number), 0) / 60)


def _marked(known: Mapping[str, Any], numbers: set[int], now: float | None) -> dict[str, Any]:
    now = time.time() if now is None else now
    spent = known.get("time", {})
    gap = min(max(now - spent.get("last", now), 0), MOST_OF_A_GAP_S)  # a clock may be set back
    seconds = dict(spent.get("seconds", {}))
    for number in map(str, numbers):
        seconds[number] = round(seconds.get(number, 0) + gap)
    return dict(known) | {"time": {"last": round(now), "seconds": seconds}}


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


def course(root: Path, chapters: Sequence[Chapter], width: int) -> Iterator[str]:
    """The map, in lines of rich's markup: a row a chapter, with a sign for each task."""
    wide = width >= WIDE
    tasks = 2 * max((len(chapter.tasks) for chapter in chapters), default=0)
    longest = max((len(chapter.title) for chapter in chapters), default=0)
    titles = min(longest, max(8, width - tasks - (30 if wide else 17))) + 1
    signs: set[str] = set()
    yield f"[bold]{'chapter':{titles + 4}}{'tasks':{tasks}} done  {'minutes' if wide else 'min'}[/]"
    for chapter in chapters:
        now = list(states(root, chapter).values())
        signs.update(STATES[state][1] for state in now)
        title = chapter.title if len(chapter.title) < titles else chapter.title[: titles - 2] + "…"
        row = " ".join(f"[{style}]{sign}[/]" for style, sign in (STATES[state] for state in now))
        row += " " * (tasks - 2 * len(now) + 1)
        done = f"{now.count('done')}/{len(now)}"
        spent = str(minutes(root, chapter) or "")
        planned = f"{' of' if spent else '':3} about {chapter.minutes}" if wide else ""
        yield f"{chapter.number:2}  {escape(f'{title:{titles}}')}{row} {done:6}{spent:>3}{planned}".rstrip()
    if legend := [f"{sign} {text}" for sign, text in LEGEND.items() if sign in signs]:
        yield f"[dim]{'   '.join(legend)}[/]"
    if any(minutes(root, chapter) for chapter in chapters):
        yield f"[dim]minutes: between two commands of the course, at most {MOST_OF_A_GAP_S // 60} of a gap[/]"


def tasks(root: Path, chapter: Chapter) -> Iterator[str]:
    """A started chapter's tasks by name, in lines of rich's markup."""
    now = states(root, chapter)
    following = next_task(root, chapter)
    for task in chapter.tasks:
        style, sign = STATES[now[task.id]]
        arrow = "→" if task == following else " "
        yield f"{arrow} [{style}]{sign}[/] {task.id}  {escape(task.title)}: [{style}]{now[task.id]}[/]"


def _path(root: Path) -> Path:
    return root / "workspace" / "progress.json"


def _load(root: Path) -> dict[str, Any]:
    path = _path(root)
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return known


def _save(root: Path, known: Mapping[str, Any]) -> None:
    path = _path(root)
    path.parent.mkdir(exist_ok=True)
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    scratch.replace(path)
