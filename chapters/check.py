"""Is the course sound? Stubs must fail with our message, final modules must pass, wrong answers must be caught."""

from __future__ import annotations

import importlib.util
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from chapters.manifest import Chapter, CourseError, Task, contains
from chapters.mutants import mutate
from chapters.runs import TIMEOUT_S, Outcome, Run, run_all
from chapters.stubs import code_lines, stub
from chapters.symbols import UnknownSymbol, module_path

IN_ORDER = "with the tasks up to"


def check(root: Path, chapters: Sequence[Chapter], console: Console, timeout_s: float = TIMEOUT_S) -> bool:
    """Check each chapter, print a line for it and what is wrong with it; whether all is well."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before the processes start: each has one core
    sound = True
    for chapter in chapters:
        with tempfile.TemporaryDirectory() as scratch:
            line, problems = _check_chapter(root, chapter, Path(scratch), console, timeout_s)
        console.print(line, soft_wrap=True)
        for problem in problems:
            console.print(f"   [red]✗[/] {escape(problem)}", soft_wrap=True, highlight=False)
        sound = sound and not problems
    return sound


def _check_chapter(
    root: Path, chapter: Chapter, scratch: Path, console: Console, timeout_s: float
) -> tuple[str, list[str]]:
    problems = _lint(root, chapter)
    all_tests = tuple(dict.fromkeys(test for task in chapter.tasks for test in task.tests))
    runs = {"final": Run(all_tests, {}, ("-x",))}
    try:
        stubs = {module: stub(root, chapter, module) for module in chapter.modules}
        runs["stubs"] = Run(all_tests, _write(root, scratch / "stubs", stubs))
    except (CourseError, UnknownSymbol) as error:
        problems.append(f"stubs: {error}")
    runs |= _in_order(root, chapter, scratch) if "stubs" in runs else {}
    names = {f"mutant {i} of {m.task} ({m.why.rstrip('.')})": m for i, m in enumerate(chapter.mutants, 1)}
    tests = {task.id: task.tests for task in chapter.tasks}
    for name, mutant in names.items():
        try:
            files = _write(root, scratch / name.partition(" (")[0], {mutant.module: mutate(root, mutant)})
            runs[name] = Run(tests[mutant.task], files, ("-x",))
        except (CourseError, UnknownSymbol) as error:
            problems.append(f"{name}: {error}")

    outcomes: dict[str, Outcome] = {}
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        shown = bar.add_task(chapter.name, total=len(runs))
        for name, outcome in run_all(root, runs, timeout_s):
            outcomes[name] = outcome
            bar.advance(shown)

    final = outcomes.pop("final")
    if final.error or final.failures:
        problems.append(f"final modules: {final.error or 'tests fail'}\n{_tail(final.output)}")
    stubbed, faults = _judge_stubs(chapter, outcomes.pop("stubs", Outcome(error="not made")))
    problems += faults
    caught = 0
    lack = _lack(chapter)
    untried = 0
    for name, outcome in ((name, outcomes[name]) for name in names if name in outcomes):
        if outcome.failures and not outcome.error:
            caught += 1
        elif lack and _only_skips(outcome):
            untried += 1
        else:
            problems.append(f"{name} is not caught: {_why_accepted(outcome)}".rstrip())
    for name, outcome in ((name, outcome) for name, outcome in outcomes.items() if name.startswith(IN_ORDER)):
        if outcome.error or outcome.failures:
            problems.append(f"{name}: {outcome.error or 'tests fail'}\n{_tail(outcome.output)}")
    number, _, slug = chapter.name.partition("_")
    line = (
        f"{number} {slug}  stubs: {stubbed} of {len(chapter.tasks)} fail with our message · "
        f"final modules {'fail' if final.error or final.failures else 'pass'} · "
        f"mutants: {caught} of {len(chapter.mutants)} caught" + (f", {untried} not tried: {lack}" if untried else "")
    )
    return line, problems


def _in_order(root: Path, chapter: Chapter, scratch: Path) -> dict[str, Run]:
    """For each task but the last its tests, when the reader has come so far and has written none of the later ones."""
    runs = {}
    for i, task in enumerate(chapter.tasks[:-1], 1):
        texts = {module: stub(root, chapter, module, chapter.tasks[:i]) for module in chapter.modules}
        runs[f"{IN_ORDER} {task.id}"] = Run(task.tests, _write(root, scratch / task.id, texts), ("-x",))
    return runs


def _lack(chapter: Chapter) -> str:
    """What this machine lacks for the chapter's tier: tests that are skipped are then no fault of the course."""
    if chapter.tier == "interpreter" and importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if chapter.tier in ("gpu", "multi-gpu"):
        import torch

        return "" if torch.cuda.is_available() else "there is no GPU"
    return ""


def _only_skips(outcome: Outcome) -> bool:
    return bool(outcome.skips) and not (outcome.passes or outcome.failures or outcome.error)


def _why_accepted(outcome: Outcome) -> str:
    if outcome.error:
        return f"{outcome.error}\n{_tail(outcome.output)}"
    if _only_skips(outcome):
        return f"its tests were skipped: {'; '.join(sorted(set(outcome.skips.values())))}"
    return "the tests pass"


def _judge_stubs(chapter: Chapter, outcome: Outcome) -> tuple[int, list[str]]:
    """How many tasks fail as they should before they are written, and what is wrong with the others."""
    if outcome.error:
        return 0, [f"stubs: {outcome.error}\n{_tail(outcome.output)}"]
    problems = []
    good = 0
    for i, task in enumerate(chapter.tasks, 1):
        texts = {node_id: text for node_id, text in outcome.failures.items() if task.has_test(node_id)}
        ours = [chapter.message(t) for t in chapter.tasks[:i]]  # a later task's test may not be needed for this one
        odd = [node_id for node_id, text in texts.items() if not any(message in text for message in ours)]
        good += bool(texts) and not odd
        skips = [text for node_id, text in outcome.skips.items() if _concerns(task, node_id)]
        if not texts and skips and not any(task.has_test(node_id) for node_id in outcome.passes):
            if not _lack(chapter):
                problems.append(f"stubs: {task.id}: its tests were skipped: {'; '.join(sorted(set(skips)))}")
        elif not texts:
            problems.append(f"stubs: {task.id}: all tests pass though it is not written")
        elif odd:
            problems.append(
                f"stubs: {task.id}: {odd[0]} fails without the message of this task or an earlier one\n"
                f"{_tail(texts[odd[0]])}"
            )
    return good, problems


def _concerns(task: Task, node_id: str) -> bool:
    """Whether a skipped test, or file, is or holds one of the task's."""
    return task.has_test(node_id) or any(contains(node_id, test) for test in task.tests)


def _lint(root: Path, chapter: Chapter) -> list[str]:
    """What is wrong with a chapter's table and page, as far as reading can tell."""
    problems = []
    path = root / "chapters" / chapter.name / "index.md"
    page = path.read_text(encoding="utf-8") if path.exists() else ""
    for task in chapter.tasks:
        if len(task.hints) != 2:
            problems.append(f"{task.id} has {len(task.hints)} hints, but must have two")
        if not task.tests:
            problems.append(f"{task.id} has no tests")
        for test in task.tests:
            if not (root / test.partition("::")[0]).exists():
                problems.append(f"{task.id}: there is no {test}")
        for macro in ("task", "solution"):
            if not re.search(rf"""\b{macro}\(\s*["']{re.escape(task.id)}["']""", page):
                problems.append(f'{task.id}: chapters/{chapter.name}/index.md has no {macro}("{task.id}")')
        try:
            lines = code_lines(root, task)
        except (CourseError, UnknownSymbol):
            continue  # the stubs tell it
        if abs(task.lines - lines) > max(2, lines // 3):
            problems.append(f"{task.id}: chapter.yml expects {task.lines} lines, but the engine's body has {lines}")
    return problems


def _write(root: Path, folder: Path, texts: Mapping[str, str]) -> dict[str, Path]:
    """The texts as files, by module."""
    folder.mkdir()
    files = {module: folder / f"{module}{module_path(root, module).suffix}" for module in texts}
    for module, path in files.items():
        path.write_text(texts[module], encoding="utf-8")
    return files


def _tail(output: str, lines: int = 15) -> str:
    return "\n".join(f"     {line}" for line in output.strip().splitlines()[-lines:])
