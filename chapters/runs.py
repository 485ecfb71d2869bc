"""Runs of pytest in processes of their own: a module can be replaced only before it is first imported."""

from __future__ import annotations

import importlib
import io
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from chapters import replace
from chapters.manifest import contains
from chapters.symbols import FOLDERS

WORKERS = 2
TIMEOUT_S = 600.0  # a run takes seconds, and minutes where the machine is busy
# Imported once for all runs, so nothing that one replaces. torch.testing would import torch.distributed.tensor anew.
PRELOAD = ["hypothesis", "pytest", "rich.progress", "torch", "torch.distributed.tensor", "transformers", "yaml"]


@dataclass(frozen=True)
class Run:
    """One run of tests with some modules replaced by files."""

    tests: tuple[str, ...]
    files: Mapping[str, Path]
    options: tuple[str, ...] = ()


@dataclass
class Outcome:
    """What a run showed. With an error, its failures say nothing about the tests."""

    error: str = ""
    failures: dict[str, str] = field(default_factory=dict)  # node id → traceback
    skips: dict[str, str] = field(default_factory=dict)  # node id, or the file's → reason
    passes: set[str] = field(default_factory=set)  # node ids
    output: str = ""


def run_all(root: Path, runs: Mapping[str, Run], timeout_s: float) -> Iterator[tuple[str, Outcome]]:
    """The outcome of each run, as they end, a few at a time."""
    forking = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if forking else "spawn")
    if forking:
        context.set_forkserver_preload(PRELOAD)
    waiting = list(runs.items())[::-1]
    active: dict[Connection, tuple[str, BaseProcess, float]] = {}
    try:
        while waiting or active:
            while waiting and len(active) < WORKERS:
                name, run = waiting.pop()
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(sender, root, run))
                process.start()
                sender.close()  # so that a crash of the child ends the pipe
                active[receiver] = name, process, time.monotonic() + timeout_s
            first_deadline = min(deadline for _, _, deadline in active.values())
            ready = wait(list(active), timeout=max(0.0, first_deadline - time.monotonic()))
            for receiver, (name, process, deadline) in list(active.items()):
                if receiver in ready:
                    try:
                        outcome = receiver.recv()
                    except EOFError:
                        outcome = Outcome(error="the process died")
                elif time.monotonic() >= deadline:
                    process.kill()
                    outcome = Outcome(error=f"it hangs: no result after {timeout_s:g} s")
                else:
                    continue
                process.join()
                del active[receiver]
                yield name, outcome
    finally:
        for _, process, _ in active.values():
            process.kill()


def _child(sender: Connection, root: Path, run: Run) -> None:
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # importing plugins would take longer than most tests
    if shutil.which("nvidia-smi") is None:  # as in tests/conftest.py, which is read after the modules are imported
        os.environ.setdefault("TRITON_INTERPRET", "1")
    os.chdir(root)
    sys.path[:0] = [str(root), *(str(root / folder) for folder in FOLDERS.values())]
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        outcome = _run_tests(run)
    outcome.output = output.getvalue()
    sender.send(outcome)


def _run_tests(run: Run) -> Outcome:
    import pytest
    from hypothesis import Phase, settings

    # Reproducible verdicts, and no time for shrinking examples that nobody reads.
    settings.register_profile("check", derandomize=True, database=None, phases=[Phase.explicit, Phase.generate])
    settings.load_profile("check")
    replace.install(run.files)
    outcome = Outcome()
    for module in replace.importable(run.files):
        try:
            importlib.import_module(module)
        except Exception as error:
            return Outcome(error=f"{module} cannot be imported: {type(error).__name__}: {error}")

    files = list(dict.fromkeys(test.partition("::")[0] for test in run.tests))
    unknown: list[str] = []

    class Watch:
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            # Given node ids, pytest would refuse those of a file that is skipped as a whole.
            kept = {test: [item for item in items if contains(test, item.nodeid)] for test in run.tests}
            skipped = {test for test in kept if any(contains(test.partition("::")[0], file) for file in outcome.skips)}
            unknown.extend(test for test, own in kept.items() if not own and test not in skipped)
            items[:] = dict.fromkeys(item for own in kept.values() for item in own)

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                outcome.failures.setdefault(report.nodeid, report.longreprtext)
            elif report.passed and report.when == "call":
                outcome.passes.add(report.nodeid)
            self.pytest_collectreport(report)

        def pytest_collectreport(self, report: pytest.CollectReport | pytest.TestReport) -> None:
            if report.skipped and isinstance(report.longrepr, tuple):
                outcome.skips[report.nodeid] = report.longrepr[2].removeprefix("Skipped: ")

    without = ("no:cacheprovider", "no:unraisableexception")  # the latter collects all garbage, twice
    options = ["-q", "--tb=short", *(f"-p{plugin}" for plugin in without), f"--rootdir={Path.cwd()}", *run.options]
    code = pytest.main([*options, *files], plugins=[Watch()])
    ends_well = code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    if unknown and (ends_well or code == pytest.ExitCode.NO_TESTS_COLLECTED):
        outcome.error = f"there is no test {unknown[0]}"
    elif not ends_well and not (code == pytest.ExitCode.NO_TESTS_COLLECTED and outcome.skips):
        outcome.error = (
            f"pytest ends with {pytest.ExitCode(code).name.lower().replace('_', ' ')}, not with test results"
        )
    return outcome
