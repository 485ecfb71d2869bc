"""The reader's files: workspace/chNN/<module>.py (or .cu, .cuh), one for each module that has tasks in the chapter."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path

from chapters.definition import Definition
from chapters.manifest import Chapter, CourseError, Task
from chapters.stubs import stub
from chapters.symbols import find, language, module_path


def folder(root: Path, chapter: Chapter) -> Path:
    """Where a chapter's files are kept."""
    return root / "workspace" / f"ch{chapter.number:02d}"


def files(root: Path, chapter: Chapter) -> dict[str, Path]:
    """The reader's file for each of the chapter's modules, there or not."""
    shared = Counter(module.rpartition(".")[2] for module in chapter.modules)
    names = {module: _file_name(module, shared) + module_path(root, module).suffix for module in chapter.modules}
    return {module: folder(root, chapter) / name for module, name in names.items()}


def _file_name(module: str, shared: Counter[str]) -> str:
    package, _, name = module.rpartition(".")
    return name if shared[name] == 1 else f"{package.rpartition('.')[2]}_{name}"


def is_started(root: Path, chapter: Chapter) -> bool:
    """Whether the reader has begun this chapter."""
    return folder(root, chapter).is_dir()


def start(root: Path, chapter: Chapter) -> list[Path]:
    """Write the stubs that are not there yet, and say which.

    Raises:
        CourseError: all are there.
    """
    missing = {module: path for module, path in files(root, chapter).items() if not path.exists()}
    if not missing:
        raise CourseError(
            f"chapter {chapter.number} is started already, in {_show(root, folder(root, chapter))}: go on there, or "
            f"begin again with `python -m chapters reset {chapter.number}`, which keeps a copy"
        )
    texts = {path: stub(root, chapter, module) for module, path in missing.items()}
    folder(root, chapter).mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return list(texts)


def reset(root: Path, chapter: Chapter) -> Path:
    """Begin the chapter again; returns where the old files are kept."""
    old = folder(root, chapter)
    if not is_started(root, chapter):
        raise CourseError(f"chapter {chapter.number} is not started: `python -m chapters start {chapter.number}`")
    backups = (old.with_name(f"{old.name}.backup-{n}") for n in count(1))
    backup = next(path for path in backups if not path.exists())
    old.rename(backup)
    start(root, chapter)
    return backup


def own_files(root: Path, chapter: Chapter) -> dict[str, Path]:
    """The reader's files of one chapter, all of them, checked."""
    found = files(root, chapter)
    if missing := [path for path in found.values() if not path.exists()]:
        raise CourseError(f"there is no {_show(root, missing[0])}: run `python -m chapters start {chapter.number}`")
    _examine(root, chapter, found)
    return found


def files_up_to(root: Path, chapters: Iterable[Chapter], last: Chapter) -> dict[str, Path]:
    """The reader's files of a chapter, and those of earlier chapters for other modules.

    An earlier chapter's file has gaps for the chapters after it. So the latest chapter with tasks in a module decides:
    until that one is started, the engine keeps its own module.
    """
    found = own_files(root, last)
    latest = {module: chapter for chapter in chapters if chapter.number <= last.number for module in chapter.modules}
    for module, chapter in latest.items():
        path = files(root, chapter)[module]
        if module not in found and path.exists():
            _examine(root, chapter, {module: path})
            found[module] = path
    return found


def digests(root: Path, chapter: Chapter) -> dict[str, str]:
    """For each task, a hash of the reader's file without the bodies of the chapter's other tasks."""
    return {
        task.id: _digest(path, chapter, task) for task in chapter.tasks for path in [files(root, chapter)[task.module]]
    }


def _digest(path: Path, chapter: Chapter, task: Task) -> str:
    others = [other.qualname for other in chapter.tasks if other.module == task.module and other != task]
    try:
        meaning = language(path).meaning(_read(path), without=others)
    except (OSError, SyntaxError):
        return ""
    return hashlib.sha256(meaning.encode()).hexdigest()[:16]


def _examine(root: Path, chapter: Chapter, found: Mapping[str, Path]) -> None:
    """Refuse files that cannot be parsed, or whose task functions cannot be called as the engine calls them."""
    for module, path in found.items():
        text = _read(path)
        try:
            language(path).check(text, str(path))
        except SyntaxError as error:
            raise CourseError(f"{_show(root, path)}:{error.lineno or 1}: syntax error: {error.msg}") from None
        for task in chapter.tasks:
            if task.module == module:
                _examine_task(root, task, path, language(path).find(text, task.qualname))


def _examine_task(root: Path, task: Task, path: Path, place: Definition | None) -> None:
    expected = find(root, task.symbol).place.parameters
    if place is None:
        raise CourseError(
            f"{_show(root, path)}: there is no {task.qualname} any more; task {task.id} is the body of "
            f"{task.qualname}({', '.join(expected)})"
        )
    if place.parameters != expected:
        raise CourseError(
            f"{_show(root, path)}:{place.line}: {task.qualname} takes ({', '.join(place.parameters)}), but the engine "
            f"calls it with ({', '.join(expected)}): restore the parameters' names and order"
        )


def _read(path: Path) -> str:
    """The text of a file that any editor may have written."""
    return path.read_text(encoding="utf-8-sig", errors="replace")


def _show(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix()
