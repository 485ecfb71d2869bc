"""A final module with the bodies of task functions taken out. Everything else stays as it stands, to the letter."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from chapters import symbols
from chapters.definition import Definition
from chapters.manifest import Chapter, CourseError, Task, load_chapters


def stub(root: Path, chapter: Chapter, module: str, written: Collection[Task] = ()) -> str:
    """The module's text as the chapter's reader gets it: each task's body is one line with the task's message.

    The tasks of later chapters are taken out too: nobody wants to read their solutions yet. Ops stay, since the engine
    calls all of them from chapter 3 on, and the reader's file of chapter 1 is in it until chapter 8.

    Args:
        written: tasks that the reader has solved, as the engine does.
    """
    path = symbols.module_path(root, module)
    lines = (root / path).read_text(encoding="utf-8").split("\n")
    unwritten = [c for c in load_chapters(root) if c.number >= chapter.number]
    ops = module.startswith("minisgl_kernels.")
    messages = {
        task: c.message(task)
        for c in unwritten
        for task in c.tasks
        if task.module == module and task not in written and (c.number == chapter.number or not ops)
    }
    cuts = [(_place(root, task), symbols.language(path).stub(message)) for task, message in messages.items()]
    for place, line in sorted(cuts, key=lambda cut: cut[0].body, reverse=True):
        lines[slice(*place.body)] = [" " * place.indent + line]
    return "\n".join(lines)


def code_lines(root: Path, task: Task) -> int:
    """How many lines of code the engine's own body of the task has: no blanks, no comments."""
    path = symbols.module_path(root, task.module)
    lines = (root / path).read_text(encoding="utf-8").split("\n")
    count: int = symbols.language(path).code_lines(lines[slice(*_place(root, task).body)])
    return count


def _place(root: Path, task: Task) -> Definition:
    place = symbols.find(root, task.symbol).place
    if place.flaw:
        raise CourseError(f"task {task.id}: {task.symbol} {place.flaw}")
    return place
