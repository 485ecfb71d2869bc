"""How fast the engine is with the reader's files inside, beside the final modules on the same machine.

`python -m chapters speed` measures with `minisgl bench ladder`, each engine in a process of its own, the two in turns,
and keeps the result in workspace/speed.json; `status` draws it. Machines differ, so the ratio counts. The reference,
benchmarks/results/ladder*.json, is of another machine: it is shown where the work and the kind of device are the same.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from rich.markup import escape

from benchmarks import fresh
from chapters import progress, replace, workspace
from chapters.manifest import Chapter, CourseError, find_chapter

ON_A_CPU, ON_A_GPU = range(1, 6), range(1, 9)  # chapters after these have no place on the ladder
REFERENCES = ("ladder", "ladder_gpu")
BAR = 14  # columns of the longest
WIDE = 76  # columns from which there are bars, titles and the reference
Entry = dict[str, Any]


def to_measure(root: Path, chapters: Sequence[Chapter], number: int | None, device: str) -> list[Chapter]:
    """The chapter of that number, or without one all of the ladder whose tasks are done.

    Raises:
        CourseError: there is none.
    """
    ladder = ON_A_CPU if device == "cpu" else ON_A_GPU
    if number is None:
        done = [c for c in chapters if c.number in ladder and not progress.next_task(root, c)]
        if not done:
            raise CourseError(
                "no chapter of the ladder is done yet: `python -m chapters status` shows what is next, and "
                "`python -m chapters speed 1` measures chapter 1 as it is"
            )
        return done
    if number not in ON_A_GPU:
        raise CourseError(f"chapter {number} has no place on the ladder: choose one of 1 to {ON_A_GPU[-1]}")
    if number not in ladder:
        raise CourseError(f"chapter {number} is made for a GPU: python -m chapters speed {number} --device cuda")
    return [find_chapter(root, chapters, number)]


def measure(
    root: Path, chapter: Chapter, files: Mapping[str, Path], options: Sequence[str], rounds: int,
    tell: Callable[[str], object] = lambda what: None,
) -> Entry:  # fmt: skip
    """Both engines of a chapter, one after the other, `rounds` times.

    Args:
        files: the reader's, by module.
        options: of `minisgl bench ladder`.
        tell: called before each of the 2 × rounds runs, with what it runs.

    Raises:
        CourseError: an engine fails, or the reader's writes other tokens in float32.
    """
    runs: dict[str, list[Entry]] = {"yours": [], "final": []}
    for round_ in range(rounds):
        for who in sorted(runs, reverse=round_ % 2 == 0):  # yours, final, final, yours …
            tell(f"chapter {chapter.number}, {who}")
            runs[who].append(_run(root, chapter, files if who == "yours" else {}, options))
    yours, final = runs["yours"][0], runs["final"][0]
    if yours["dtype"] == "float32" and yours["tokens"] != final["tokens"]:
        raise CourseError(
            f"your engine of chapter {chapter.number} writes other tokens than the final modules, so its speed says "
            f"nothing: pytest {chapter.test_folder} --mine"
        )
    shared = {name: final[name] for name in ("device", "dtype", "prompt_tokens")}
    shared |= {"output_tokens": _count(final), "options": list(options), "rounds": rounds}
    return {
        **shared,
        "date": date.today().isoformat(),
        "files": digest(files.values()),
        "yours": _summary(runs["yours"]),
        "final": _summary(runs["final"]),
    }


def _run(root: Path, chapter: Chapter, files: Mapping[str, Path], options: Sequence[str]) -> Entry:
    command = [sys.executable, "-m", "chapters.replace", "benchmarks.ladder", *options, "--only", str(chapter.number)]
    env = fresh.environment() | replace.variables(files)
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(fresh.MARK)]
    if done.returncode or not lines:
        whose = "your engine" if files else "the final engine"
        said = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "it gave nothing back")
        raise CourseError(f"{whose} of chapter {chapter.number} does not run: {said.strip()}")
    result: Entry = json.loads(lines[-1].removeprefix(fresh.MARK))
    return result


def _count(result: Entry) -> int:
    return sum(map(len, result["tokens"]))


def _summary(results: Sequence[Entry]) -> Entry:
    tokens, work = _count(results[0]), results[0]["work"]
    return {
        "tokens_per_s": tokens / median(result["seconds"] for result in results),
        "rows": work["tokens_computed"] / tokens,
        "steps": work["steps"] / tokens,
    }


def digest(paths: Iterable[Path]) -> str:
    """Of the files' contents, to tell whether they were edited since."""
    text = b"".join(path.read_bytes() for path in sorted(paths) if path.exists())
    return hashlib.sha256(text).hexdigest()[:16]


def save(root: Path, chapter: Chapter, entry: Entry) -> None:
    """Keep a chapter's latest measurement."""
    path = root / "workspace" / "speed.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(load(root) | {str(chapter.number): entry}, indent=1) + "\n", encoding="utf-8")


def load(root: Path) -> dict[str, Entry]:
    """All measurements, by the chapter's number."""
    path = root / "workspace" / "speed.json"
    known: dict[str, Entry] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return known


def reference(root: Path, number: str, entry: Entry) -> tuple[float, str] | None:
    """Tokens per second of the same work on the same kind of device in benchmarks/results, and which device that is."""
    for name in REFERENCES:
        path = root / "benchmarks" / "results" / f"{name}.json"
        record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"data": {"chapters": {}}}
        data = record["data"]
        row = data["chapters"].get(number)
        same = [data.get(name) == entry[name] for name in ("device", "dtype")]
        same += [bool(row) and row[name] == entry[name] for name in ("prompt_tokens", "output_tokens")]
        if all(same):
            return row["tokens_per_s"], record["device"]
    return None


def table(root: Path, chapters: Sequence[Chapter], width: int) -> Iterator[str]:
    """What was measured, in lines of rich's markup. A bar is the reader's speed, its pale end what final has more."""
    known = load(root)
    shown = [chapter for chapter in chapters if str(chapter.number) in known]
    if not shown:
        return
    wide = width >= WIDE
    most = max(known[str(c.number)][who]["tokens_per_s"] for c in shown for who in ("yours", "final"))
    devices: list[str] = []
    edited = False
    head = f"{'output tokens a second':25}" if wide else f"{'tokens/s':10}"
    yield (
        f"[bold]{head}{'yours':>7}{'final':>7}{'ratio':>7}{'reference':>11}[/]"
        if wide
        else (f"[bold]{head}{'yours':>7}{'final':>7}{'ratio':>7}[/]")
    )
    for chapter in shown:
        entry = known[str(chapter.number)]
        mine, final = entry["yours"], entry["final"]
        yours, theirs = mine["tokens_per_s"], final["tokens_per_s"]
        row = f"{_short(yours):>7}{_short(theirs):>7}{yours / theirs:>7.2f}"
        star = "*" if _edited(root, chapters, chapter, entry) else " "
        edited = edited or star == "*"
        if not wide:
            yield f"chapter {chapter.number:2}{row}{star}".rstrip()
            continue
        title = chapter.title if len(chapter.title) <= 20 else chapter.title[:19] + "…"
        speed, device = reference(root, str(chapter.number), entry) or (None, "")
        devices += [device] if device and device not in devices else []
        full, whole = (max(round(BAR * value / most), 1) for value in (yours, max(yours, theirs)))
        bar = f"[cyan]{'█' * full}[/][dim]{'░' * (whole - full)}[/]"
        yield f"{chapter.number:2}  {escape(f'{title:21}')}{row}{star}{_short(speed) if speed else '–':>10}  {bar}"
        if any(abs(mine[name] - final[name]) > 0.005 * final[name] for name in ("rows", "steps")):
            works = (f"{work['rows']:.1f} rows and {work['steps']:.2f} steps" for work in (mine, final))
            yield f"    [yellow]work for each token: {', final '.join(works)}[/]"
    yield "[dim]final: the course's own modules on this machine; ratio: yours to final[/]"
    if devices:
        yield f"[dim]reference: the same work on {escape(' and '.join(devices))}[/]"
    if edited:
        yield "[dim]* measured before you changed your files[/]"


def _edited(root: Path, chapters: Sequence[Chapter], chapter: Chapter, entry: Entry) -> bool:
    try:
        return digest(workspace.files_up_to(root, chapters, chapter).values()) != entry["files"]
    except CourseError:  # one is gone, or has an error now
        return True


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
