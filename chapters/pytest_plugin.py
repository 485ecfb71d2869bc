"""`pytest tests/chNN_slug --mine`: test the reader's files in place of the final modules, and remember the outcome.

Loaded by tests/conftest.py, which must not import minisgl: modules are replaced when they are first imported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from chapters import progress, replace, workspace
from chapters.manifest import Chapter, CourseError, contains, load_chapters
from chapters.symbols import UnknownSymbol, language


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "test the files you wrote in workspace/, in place of the engine's modules (one chapter's folder at a time)"
    parser.addoption("--mine", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("mine"):
        return
    given = [str(arg).partition("=")[0] for arg in config.invocation_params.args]
    if config.option.tbstyle == "auto" and "--tb" not in given:
        config.option.tbstyle = "short"
    if not config.option.maxfail and "--maxfail" not in given:
        config.option.maxfail = 3
    try:
        config.pluginmanager.register(Mine(config), "mine")
    except (CourseError, UnknownSymbol) as error:
        raise pytest.UsageError(str(error)) from None


class Mine:
    """One run of one chapter's tests on the reader's files."""

    def __init__(self, config: pytest.Config) -> None:
        self.root = config.rootpath
        self.chapters = load_chapters(self.root)
        self.selected = [_node_id(config, arg) for arg in config.args]
        self.chapter = _only_chapter(self.chapters, self.selected)
        self.files = workspace.own_files(self.root, self.chapter)
        self.failed: set[str] = set()
        self.passed: set[str] = set()
        self.left: Counter[str] = Counter()  # tests still to finish, by task
        self.digests = workspace.digests(self.root, self.chapter)
        replace.install(self.files)
        replace.load(self.root, self.files)

    def pytest_report_header(self) -> list[str]:
        return [f"mine: {path.relative_to(self.root)} in place of {module}" for module, path in self.files.items()]

    @pytest.hookimpl(tryfirst=True)  # before -k and -m drop any: a task is done when all of its tests ran
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for task in reversed(self.chapter.tasks):
            tests = [item for item in items if task.has_test(item.nodeid)]
            for item in tests:
                item.user_properties.append((f"task {task.id}", len(tests)))  # travels with the report, under xdist too
            # In the order of the tasks, so that the first failures are those of the task to work on.
            items.sort(key=lambda item: not task.has_test(item.nodeid))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            tasks = (t for t in self.chapter.tasks if any(contains(report.nodeid, test) for test in t.tests))
            self.failed.update(task.id for task in tasks)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.excinfo and (gap := self._gap(call.excinfo)):
            report.longrepr = gap  # not written yet: a traceback tells no more
        return report

    def _gap(self, failure: pytest.ExceptionInfo[BaseException]) -> str:
        """The place that a failure came to and that says it is not written yet, or nothing."""
        place = failure.traceback[-1]
        path = Path(place.path)
        if failure.errisinstance(NotImplementedError) and path in self.files.values():
            return f"{path.relative_to(self.root)}:{place.lineno + 1}: {failure.exconly()}"
        # Triton's interpreter wraps the error, and a compiler only prints the line: the message stays.
        told = "\n".join(_chain(failure.value))
        for task in self.chapter.tasks:
            message = self.chapter.message(task)
            path = self.files[task.module]
            if message in told and (line := _line(path, language(path).stub(message))):
                return f"{path.relative_to(self.root)}:{line}: {language(path).said(message)}"
        return ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, number in report.user_properties:
            if not name.startswith("task "):
                continue
            task_id = name.removeprefix("task ")
            self.left.setdefault(task_id, int(str(number)))
            if report.failed:
                self.failed.add(task_id)
            if report.passed and report.when == "call":
                self.passed.add(task_id)
            if report.when == "teardown":
                self.left[task_id] -= 1

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # the last lines on the screen
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Generator[None, None, None]:
        yield
        progress.record(self.root, self._outcomes(), self.digests)
        terminalreporter.section(f"your chapter {self.chapter.number}")
        for line in self.pytest_report_header():
            terminalreporter.write_line(line)
        for task_id, state in progress.states(self.root, self.chapter).items():
            colour = {"done": "green", "failing": "red"}.get(state, "yellow")
            terminalreporter.write_line(f"{task_id}  {state}", **{colour: True})
        terminalreporter.write_line(progress.advice(self.root, self.chapters, self.chapter))

    def _outcomes(self) -> dict[str, str]:
        """A task whose tests ran in part, without a failure, keeps what is known of the same code."""
        outcomes = dict.fromkeys(self.failed, "failing")
        before = progress.states(self.root, self.chapter)
        for task in self.chapter.tasks:
            asked_for_all = all(any(contains(arg, test) for arg in self.selected) for test in task.tests)
            if task.id not in self.passed - self.failed:
                continue
            if self.left[task.id] == 0 and asked_for_all:
                outcomes[task.id] = "done"
            elif before[task.id] in ("not run", "changed"):
                outcomes[task.id] = "partly run"
        return outcomes


def _chain(error: BaseException | None) -> Iterator[str]:
    """What an error says, and what those say that it came from."""
    while error:
        yield str(error)
        error = error.__cause__ or error.__context__


def _line(path: Path, statement: str) -> int:
    """The number of the line that is this statement; 0 if none is."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((n for n, line in enumerate(lines, 1) if line.strip() == statement), 0)


def _node_id(config: pytest.Config, arg: str) -> str:
    """An argument of the command line as a node id, which counts from the root."""
    path, colons, names = arg.partition("::")
    full = (config.invocation_params.dir / path).resolve()
    return (
        (full.relative_to(config.rootpath).as_posix() if full.is_relative_to(config.rootpath) else arg) + colons + names
    )


def _only_chapter(chapters: list[Chapter], selected: list[str]) -> Chapter:
    asked = [next((c for c in chapters if contains(c.test_folder, node_id)), None) for node_id in selected]
    if not asked or asked[0] is None or any(chapter != asked[0] for chapter in asked):
        example = chapters[0].test_folder if chapters else "tests/chNN_slug"
        raise CourseError(f"--mine tests one chapter at a time, such as: pytest {example} --mine")
    return asked[0]
