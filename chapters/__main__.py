"""Write the engine's functions yourself, chapter by chapter, and run the engine with yours inside."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.syntax import Syntax
from rich_argparse import RawDescriptionRichHelpFormatter

from chapters import progress, replace, speed, symbols, workspace
from chapters.manifest import CourseError, find_chapter, find_task, load_chapters

_EXAMPLES = """\
a chapter, from start to end:
  python -m chapters start 1                 writes workspace/ch01/*.py with gaps
  pytest tests/ch01_naive_decode --mine      tests what you wrote
  python -m chapters hint 01.1               and `hint 01.1 2` for the second one
  python -m chapters status                  what is done, what is next, how fast your engine is
  python -m chapters run 1 chat              chat through your own code
  python -m chapters speed 1                 its speed beside the finished modules', in a minute
"""
SPEED_OPTIONS = {
    "requests": "; 4 for a quick look",
    "batch": "",
    "max-tokens": "; 16 for a quick look",
    "model": "",
    "device": ": cuda takes chapters 6 to 8 in",
    "dtype": "",
    "kernels": "; auto with --device cuda",
}
_out = Console(highlight=False, soft_wrap=True)
_notes = Console(highlight=False, soft_wrap=True, stderr=True)


def main(argv: Sequence[str] | None = None, root: Path = symbols.ROOT) -> int:
    """Run one command. A mistake ends with one line on stderr and exit status 1."""
    args = _parser().parse_args(argv)
    try:
        return args.run(root, args) or 0
    except (CourseError, symbols.UnknownSymbol) as error:
        _notes.print("[bold red]chapters:[/]", end=" ")
        _notes.print(str(error), markup=False)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m chapters",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=RawDescriptionRichHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="command", required=True)

    def command(name: str, run: object, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, formatter_class=parser.formatter_class)
        sub.set_defaults(run=run)
        return sub

    command("start", _start, "Write the chapter's files, with gaps for you to fill.").add_argument(
        "chapter", type=_number, help="the chapter's number"
    )
    command("status", _status, "Show what is done, what is next, the time it took and the speed of your engine.")
    hint = command("hint", _hint, "Show a hint for a task.")
    hint.add_argument("task", help="the task's id, such as 01.2")
    hint.add_argument("number", type=int, nargs="?", default=1, help="1 nudges (the default), 2 says how")
    command("solution", _solution, "Show the engine's own code for a task.").add_argument(
        "task", help="the task's id, such as 01.2"
    )
    run = command("run", _run, "Run the complete engine with your files inside.")
    run.add_argument("chapter", type=_number, help="the chapter's number; your files of earlier chapters are used too")
    run.add_argument("args", nargs=argparse.REMAINDER, help="what follows minisgl: chat, or generate and a prompt …")
    ladder = command(
        "speed", _speed, "Measure the engine with your files inside, beside the final modules: see `status`."
    )
    ladder.add_argument("chapter", type=_number, nargs="?", help="default: every chapter of the ladder that is done")
    ladder.add_argument(
        "--rounds", type=int, default=1, help="times to run each engine; the median counts (%(default)s)"
    )
    for name in SPEED_OPTIONS:
        ladder.add_argument(f"--{name}", help=f"as of `minisgl bench ladder`{SPEED_OPTIONS[name]}")
    command("reset", _reset, "Begin a chapter again; your old files are kept as a backup.").add_argument(
        "chapter", type=_number, help="the chapter's number"
    )
    command("doctor", _doctor, "Show what this machine has, and which chapters will run on it.")
    command("check", _check, "For authors: try stubs, final modules and wrong answers against the tests.").add_argument(
        "chapter", type=_number, nargs="?", help="only this chapter"
    )
    figures = command("figures", _figures, "For authors: draw the figures of all pages.")
    figures.add_argument("--check", action="store_true", help="write nothing; exit 1 if a figure is stale")
    return parser


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a chapter's number, such as 1")
    return int(text)


def _start(root: Path, args: argparse.Namespace) -> None:
    chapter = find_chapter(root, load_chapters(root), args.chapter)
    written = workspace.start(root, chapter)
    progress.mark(root, chapter, begins=True)
    for path in written:
        _out.print(f"wrote [bold]{path.relative_to(root)}[/]")
    _out.print(f"\nchapter {chapter.number}: {chapter.title}, about {chapter.minutes} minutes")
    own = workspace.files(root, chapter)
    for task in chapter.tasks:
        _out.print(f"  {task.id}  {task.title}: [bold]{task.qualname}[/] in {own[task.module].relative_to(root)}")
    _out.print(f"\nread   chapters/{chapter.name}/index.md\nverify pytest {chapter.test_folder} --mine")


def _status(root: Path, args: argparse.Namespace) -> None:
    chapters = load_chapters(root)
    started = [chapter for chapter in chapters if workspace.is_started(root, chapter)]
    _show(progress.course(root, chapters, _out.width))
    if started:
        if progress.next_task(root, started[-1]):
            _show(["", f"chapter {started[-1].number}", *progress.tasks(root, started[-1])])
        _out.print(f"\n{progress.advice(root, chapters, started[-1])}", markup=False)
    elif chapters:
        _out.print(f"\nnext: python -m chapters start {chapters[0].number}")
    if speeds := list(speed.table(root, chapters, _out.width)):
        _show(["", *speeds])


def _show(lines: Iterable[str]) -> None:
    for line in lines:
        _out.print(line)


def _speed(root: Path, args: argparse.Namespace) -> None:
    given = {name: value for name in SPEED_OPTIONS if (value := getattr(args, name.replace("-", "_"))) is not None}
    device = given.get("device", "cpu")
    given.setdefault("kernels", "torch" if device == "cpu" else "auto")
    options = [text for name, value in given.items() for text in (f"--{name}", value)]
    chapters = load_chapters(root)
    chosen = speed.to_measure(root, chapters, args.chapter, device)
    files = {chapter.number: workspace.files_up_to(root, chapters, chapter) for chapter in chosen}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_notes, transient=True, disable=not _notes.is_terminal) as bar:
        shown = bar.add_task("", total=2 * args.rounds * len(chosen), completed=-1)
        for chapter in chosen:
            progress.mark(root, chapter)
            tell = partial(_tell, bar, shown)
            entry = speed.measure(root, chapter, files[chapter.number], options, args.rounds, tell)
            speed.save(root, chapter, entry)
    _show(speed.table(root, chapters, _out.width))
    if args.rounds == 1:
        _out.print("[dim]one run each: a difference of a tenth may be chance; --rounds 3 says more[/]")


def _tell(bar: Progress, shown: TaskID, what: str) -> None:
    bar.update(shown, advance=1, description=what)


def _hint(root: Path, args: argparse.Namespace) -> None:
    chapter, task = find_task(load_chapters(root), args.task)
    progress.mark(root, chapter)
    if not 1 <= args.number <= len(task.hints):
        raise CourseError(f"task {task.id} has no hint {args.number}; it has {len(task.hints)}")
    _out.print(f"[bold]{task.id} {task.title}[/], hint {args.number} of {len(task.hints)}")
    _out.print(task.hints[args.number - 1], markup=False)
    if args.number < len(task.hints):
        _out.print(f"[dim]more: python -m chapters hint {task.id} {args.number + 1}[/]")


def _solution(root: Path, args: argparse.Namespace) -> None:
    chapter, task = find_task(load_chapters(root), args.task)
    progress.mark(root, chapter)
    symbol = symbols.find(root, task.symbol)
    _out.print(f"[bold]{task.id} {task.title}[/], {symbol.path}:{symbol.place.start + 1}")
    _out.print(Syntax("", symbols.language(symbol.path).LEXER, background_color="default").highlight(symbol.source))


def _reset(root: Path, args: argparse.Namespace) -> None:
    chapter = find_chapter(root, load_chapters(root), args.chapter)
    progress.mark(root, chapter)
    backup = workspace.reset(root, chapter)
    progress.forget(root, chapter)
    _out.print(f"chapter {chapter.number} begins again; your old files are in {backup.relative_to(root)}")


def _run(root: Path, args: argparse.Namespace) -> int:
    command, rest = args.args[:1], args.args[1:]
    if command == ["bench"]:
        raise CourseError(
            f"your engine's speed, beside that of the final modules: python -m chapters speed {args.chapter}"
        )
    chapters = load_chapters(root)
    chosen = find_chapter(root, chapters, args.chapter)
    files = workspace.files_up_to(root, chapters, chosen)
    progress.mark(root, chosen)
    for module, path in files.items():
        _notes.print(f"[dim]{path.relative_to(root)} in place of {module}[/]")
    sys.path[:0] = [str(root), *(str(root / folder) for folder in symbols.FOLDERS.values())]
    replace.install(files)
    replace.load(root, files)
    from minisgl.cli import main as minisgl

    chapter = ["--chapter", str(args.chapter)] if command and not command[0].startswith("-") else []
    minisgl([*command, *chapter, *rest])
    return 0


def _doctor(root: Path, args: argparse.Namespace) -> None:
    from chapters.doctor import table

    _out.print(table(root), soft_wrap=False)  # a table folds its last column; the console would cut it


def _check(root: Path, args: argparse.Namespace) -> int:
    from chapters.check import check

    chapters = load_chapters(root)
    chosen = chapters if args.chapter is None else [find_chapter(root, chapters, args.chapter)]
    return 0 if check(root, chosen, _out) else 1


def _figures(root: Path, args: argparse.Namespace) -> int:
    from chapters.figures import main as figures

    return figures(["--check"] if args.check else [])


if __name__ == "__main__":
    sys.exit(main())
