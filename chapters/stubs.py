"""A final module with the bodies of task functions taken out. Everything else stays as it stands, to the letter."""

from __future__ import annotations

import ast
import json
from pathlib import Path

from chapters import symbols
from chapters.manifest import Chapter, CourseError, Task, load_chapters


def stub(root: Path, chapter: Chapter, module: str) -> str:
    """The module's text as the chapter's reader gets it: each task's body is one raise with the task's message.

    The tasks of later chapters are taken out too: nobody wants to read their solutions yet.
    """
    lines = (root / symbols.module_path(module)).read_text(encoding="utf-8").split("\n")
    unwritten = [c for c in load_chapters(root) if c.number >= chapter.number]
    messages = {task: c.message(task) for c in unwritten for task in c.tasks if task.module == module}
    cuts = [(*_body(root, task, lines), message) for task, message in messages.items()]
    for start, end, indent, message in sorted(cuts, reverse=True):
        lines[start:end] = [f"{' ' * indent}raise NotImplementedError({json.dumps(message, ensure_ascii=False)})"]
    return "\n".join(lines)


def code_lines(root: Path, task: Task) -> int:
    """How many lines of code the engine's own body of the task has: no blanks, no comments."""
    lines = (root / symbols.module_path(task.module)).read_text(encoding="utf-8").split("\n")
    start, end, _ = _body(root, task, lines)
    return sum(1 for line in lines[start:end] if line.strip() and not line.lstrip().startswith("#"))


def _body(root: Path, task: Task, lines: list[str]) -> tuple[int, int, int]:
    """Where a task's body, without its docstring, stands among its module's lines: start, end and indentation."""
    node = symbols.find(root, task.symbol).node
    if isinstance(node, ast.ClassDef):
        raise CourseError(f"task {task.id}: {task.symbol} is a class; a task is a function or a method")
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if not body or not lines[body[0].lineno - 1][: body[0].col_offset].isspace():
        raise CourseError(f"task {task.id}: {task.symbol} has no body on lines of its own to take out")
    start = min(d.lineno for d in (body[0], *getattr(body[0], "decorator_list", []))) - 1
    while lines[start - 1].lstrip().startswith("#") or not lines[start - 1].strip():
        start -= 1  # a comment before the first statement tells as much as the statement
    end = node.end_lineno or start
    while end < len(lines) and lines[end].lstrip().startswith("#") and _indent(lines[end]) > node.col_offset:
        end += 1
    return start, end, body[0].col_offset


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
