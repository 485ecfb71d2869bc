"""A chapter's tables, chapter.yml and mutants.yml, as dataclasses. A mistake in them is told in one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

TIERS = ("cpu", "interpreter", "gpu", "multi-gpu")
_CHAPTER_KEYS = {"title": str, "minutes": int, "tier": str, "tasks": list}
_TASK_KEYS = {"id": str, "title": str, "symbol": str, "lines": int, "hints": list, "tests": list}
_MUTANT_KEYS = {"task": str, "why": str, "symbol": str, "replace": str, "with": str}


class CourseError(Exception):
    """A learner's or an author's mistake. The message is all that is shown."""


@dataclass(frozen=True)
class Task:
    """One function for the reader to write."""

    id: str
    title: str
    symbol: str
    lines: int  # expected size of the body
    hints: tuple[str, ...]
    tests: tuple[str, ...]  # paths or node ids

    @property
    def module(self) -> str:
        return self.symbol.partition(":")[0]

    @property
    def qualname(self) -> str:
        return self.symbol.partition(":")[2]

    def has_test(self, node_id: str) -> bool:
        """Whether a test, by pytest's node id, is one of this task's."""
        return any(contains(test, node_id) for test in self.tests)


@dataclass(frozen=True)
class Mutant:
    """A plausible wrong answer to a task: one edit of the engine's source that the task's tests must reject."""

    task: str
    why: str
    symbol: str
    old: str
    new: str

    @property
    def module(self) -> str:
        return self.symbol.partition(":")[0]


@dataclass(frozen=True)
class Chapter:
    """One row of the course."""

    name: str  # "04_radix_reuse"
    title: str
    minutes: int
    tier: str
    tasks: tuple[Task, ...]
    mutants: tuple[Mutant, ...]

    @property
    def number(self) -> int:
        return int(self.name.partition("_")[0])

    @property
    def test_folder(self) -> str:
        return f"tests/ch{self.name}"

    @property
    def modules(self) -> list[str]:
        """The modules that have tasks, in the order of the tasks."""
        return list(dict.fromkeys(task.module for task in self.tasks))

    def message(self, task: Task) -> str:
        """What an unwritten task says when it is called."""
        return f"{task.id} {task.title}: see chapters/{self.name}"


def contains(selection: str, node_id: str) -> bool:
    """Whether a path or node id given to pytest selects this one: itself, or a folder, file or class around it."""
    return node_id == selection or node_id.startswith((f"{selection}/", f"{selection}::", f"{selection}["))


def load_chapters(root: Path) -> list[Chapter]:
    """All chapters under root that have a chapter.yml, in order."""
    tables = (root / "chapters").glob("[0-9]*_*/chapter.yml")
    return sorted((_load(root, table) for table in tables), key=lambda chapter: chapter.number)


def load_planned(root: Path) -> dict[int, dict[str, str]]:
    """Title and subject of the chapters in planned.yml, by number."""
    path = root / "chapters" / "planned.yml"
    planned: dict[int, dict[str, str]] = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    return planned


def find_chapter(root: Path, chapters: Sequence[Chapter], number: int) -> Chapter:
    """The chapter of this number."""
    for chapter in chapters:
        if chapter.number == number:
            return chapter
    planned = load_planned(root).get(number)
    absent = f"chapter {number}, {planned['title']}, is not written yet" if planned else f"there is no chapter {number}"
    raise CourseError(f"{absent}; there are {', '.join(str(c.number) for c in chapters)}")


def find_task(chapters: Sequence[Chapter], task_id: str) -> tuple[Chapter, Task]:
    """The task of this id, and its chapter; "1.2" means "01.2"."""
    for chapter in chapters:
        for task in chapter.tasks:
            if task.id == task_id.zfill(len(task.id)):
                return chapter, task
    raise CourseError(f"there is no task {task_id}; `python -m chapters status` lists all")


def _load(root: Path, path: Path) -> Chapter:
    where = path.relative_to(root).as_posix()
    name = path.parent.name
    table = _checked(_read(path, where), _CHAPTER_KEYS, where)
    if table["tier"] not in TIERS:
        raise CourseError(f"{where}: tier is {table['tier']!r}, but must be one of {', '.join(TIERS)}")
    tasks = []
    for i, entry in enumerate(table["tasks"], 1):
        values = _checked(entry, _TASK_KEYS, f"{where}: task {i}")
        expected = f"{name.partition('_')[0]}.{i}"
        if values["id"] != expected:
            raise CourseError(f"{where}: task {i} has the id {values['id']!r}, but must have {expected!r}")
        tasks.append(Task(**values | {key: tuple(values[key]) for key in ("hints", "tests")}))
    mutants = _load_mutants(root, path.with_name("mutants.yml"), {task.id for task in tasks})
    return Chapter(name, table["title"], table["minutes"], table["tier"], tuple(tasks), mutants)


def _load_mutants(root: Path, path: Path, task_ids: set[str]) -> tuple[Mutant, ...]:
    if not path.exists():
        return ()
    where = path.relative_to(root).as_posix()
    mutants = []
    for i, entry in enumerate(_read(path, where), 1):
        values = _checked(entry, _MUTANT_KEYS, f"{where}: mutant {i}")
        if values["task"] not in task_ids:
            raise CourseError(f"{where}: mutant {i} is of task {values['task']!r}, which this chapter does not have")
        mutants.append(Mutant(values["task"], values["why"], values["symbol"], values["replace"], values["with"]))
    return tuple(mutants)


def _read(path: Path, where: str) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise CourseError(f"{where}: {' '.join(str(error).split())}") from None


def _checked(entry: object, keys: dict[str, type], where: str) -> dict[str, Any]:
    """The entry itself, once it has exactly these keys, of these types."""
    if not isinstance(entry, dict):
        raise CourseError(f"{where} is {entry!r}, but must be a mapping with {', '.join(keys)}")
    if odd := sorted(keys.keys() ^ entry.keys()):
        raise CourseError(f"{where}: {odd[0]} is {'missing' if odd[0] in keys else 'not a known key'}")
    for key, kind in keys.items():
        value = entry[key]
        if not isinstance(value, kind):
            raise CourseError(f"{where}: {key} is {value!r}, but must be of type {kind.__name__}")
        if key in ("hints", "tests") and not all(isinstance(item, str) for item in value):
            raise CourseError(f"{where}: {key} holds more than text; quote what has a colon in it")
    return entry
