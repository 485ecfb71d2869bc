"""`pytest tests/chNN_slug --mine`, run as a reader runs it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from chapters import progress, workspace
from chapters.manifest import load_chapters
from chapters.replace import MODULES
from chapters.stubs import stub
from chapters.symbols import ROOT
from tests.helpers import hf_twin, tiny_model
from tests.tiny_tokenizer import byte_level_tokenizer

MINE = "workspace/ch01/sums.py"
ANSWERS = {
    'raise NotImplementedError("01.1 Double: see chapters/01_sums")': "return 2 * x",
    'raise NotImplementedError("01.2 Add \\"twice\\": see chapters/01_sums")': "return x * times",
    'raise NotImplementedError("01.3 Count down: see chapters/01_sums")': "yield from range(n, 0, -1)",
}


@pytest.fixture
def mine(root, edit, python):
    """Start chapter 1, write some of the answers, and return a function that runs the tests."""
    chapter = load_chapters(root)[0]
    workspace.start(root, chapter)

    def mine(*args: str, answers: int = 0) -> tuple[str, int, list[str]]:
        for old, new in list(ANSWERS.items())[:answers]:
            edit(MINE, old, new)
        out, status = python("-m", "pytest", "--mine", *args)
        return out, status, list(progress.states(root, chapter).values())

    return mine


def test_unwritten_tasks_fail_with_their_message_and_are_recorded(mine):
    out, status, states = mine("tests/ch01_sums", "--maxfail=9")

    assert status == 1
    assert f"\n{MINE}:11: NotImplementedError: 01.1 Double: see chapters/01_sums\n" in out
    assert "return 2 * x" not in out
    assert states == ["failing"] * 3


@pytest.mark.parametrize(("args", "failed"), [([], 3), (["-x"], 1), (["--maxfail=0"], 5)])
def test_a_run_stops_after_three_failures_unless_told_otherwise(mine, args, failed):
    out, _, _ = mine("tests/ch01_sums", *args)

    assert f"{failed} failed" in out


def test_tests_run_in_the_order_of_the_tasks_and_those_of_no_task_last(mine, root):
    (root / "tests/ch01_sums/test_all.py").write_text("def test_all():\n    pass\n", encoding="utf-8")
    (root / "tests/ch01_sums/test_double.py").rename(root / "tests/ch01_sums/test_zero.py")
    table = root / "chapters/01_sums/chapter.yml"
    table.write_text(table.read_text(encoding="utf-8").replace("test_double.py", "test_zero.py"), encoding="utf-8")

    out, _, _ = mine("tests/ch01_sums", "--collect-only", "-q")

    names = [line.partition("::")[2] for line in out.splitlines() if "::" in line]
    assert names == ["test_double[0]", "test_double[3]", "test_triple", "test_add", "test_countdown", "test_all"]


@pytest.mark.parametrize(("args", "long"), [([], False), (["--tb=long"], True)])
def test_tracebacks_are_short_unless_told_otherwise(mine, edit, args, long):
    edit(MINE, next(iter(ANSWERS)), "return 3 * x")

    out, _, _ = mine("tests/ch01_sums", *args)

    assert ("def test_double(x):" in out) == long


def test_header_and_last_lines_say_what_was_tested_and_what_comes_next(mine):
    out, _, states = mine("tests/ch01_sums", answers=1)

    header, _, summary = out.partition("your chapter 1")
    assert f"mine: {MINE} in place of toy.sums" in header
    assert f"mine: {MINE} in place of toy.sums" in summary
    assert 'next: 01.2 Add "twice"' in summary
    assert states == ["done", "failing", "failing"]


def test_a_finished_chapter_points_to_running_it_and_to_the_next_one(mine):
    out, status, states = mine("tests/ch01_sums", answers=3)

    assert status == 0
    assert states == ["done"] * 3
    assert "python -m chapters run 1 chat, then python -m chapters start 12" in out


def test_every_importer_sees_the_readers_module(mine, edit):
    edit(MINE, "return double(x) + x", "return 0")

    out, _, states = mine("tests/ch01_sums", answers=1)

    assert "test_triple" in out
    assert states[0] == "failing"


@pytest.mark.parametrize(("answers", "told"), [(0, f"{MINE}:11: NotImplementedError: 01.1 Double"), (1, "1 passed")])
def test_processes_of_an_engine_use_the_readers_module(mine, root, answers, told):
    (root / "toy/hands.py").write_text("from toy.sums import double\n\n\ndef hand(seat):\n    seat.ready(double(4))\n")
    (root / "tests/ch01_sums/test_double.py").write_text(
        "from minisgl.distributed.ranks import Ranks\nfrom toy.hands import hand\n\n\n"
        "def test_hand():\n    assert Ranks(2, hand).wait_ready() == [8]\n"
    )

    out, _, _ = mine("tests/ch01_sums", "-k", "hand", answers=answers)

    assert told in out


@pytest.mark.parametrize(("written", "told"), [(False, "rank 1 failed:"), (True, "")])
def test_a_rank_follows_with_what_the_reader_wrote(tmp_path, written, told):
    """Only ranks that follow come to task 09.8, and those are other processes."""
    [chapter] = [c for c in load_chapters(ROOT) if c.number == 9]
    hf_twin(tiny_model()).save_pretrained(tmp_path)
    byte_level_tokenizer().save_pretrained(tmp_path)
    runner = ROOT / "minisgl/engine/runner.py"
    text = runner.read_text(encoding="utf-8") if written else stub(ROOT, chapter, "minisgl.engine.runner")
    (tmp_path / "runner.py").write_text(text, encoding="utf-8")
    flags = ["--model", str(tmp_path), "--tp", "2", "--device", "cpu", "--kv-pages", "40", "--max-tokens", "3"]

    done = subprocess.run(
        [sys.executable, "-m", "chapters.replace", "minisgl", "generate", *flags, "Once"],
        env=os.environ | {MODULES: f"minisgl.engine.runner={tmp_path / 'runner.py'}"},
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip

    assert told in done.stderr
    assert ("NotImplementedError: 09.8 Follow rank 0" in done.stderr) == (not written)
    assert done.returncode == (0 if written else 1), done.stderr


@pytest.mark.parametrize("args", [["-k", "triple"], ["tests/ch01_sums/test_double.py::test_triple"]])
def test_a_run_of_some_of_a_tasks_tests_does_not_make_it_done(mine, args):
    folder = [] if "::" in args[0] else ["tests/ch01_sums"]

    _, status, states = mine(*folder, *args, answers=3)

    assert status == 0
    assert states == ["partly run", "not run", "not run"]


def test_a_run_of_some_of_a_tasks_tests_leaves_it_done(mine):
    mine("tests/ch01_sums", answers=3)

    _, _, states = mine("tests/ch01_sums", "-k", "triple")

    assert states == ["done"] * 3


def test_outcomes_are_recorded_under_xdist(mine):
    _, _, states = mine("tests/ch01_sums", "-p", "xdist", "-n", "2", answers=2)

    assert states == ["done", "done", "failing"]


def test_a_file_that_fails_on_import_is_one_line(mine, edit):
    edit(MINE, "class Tally:", "class Tally(Missing):")

    out, status, _ = mine("tests/ch01_sums")

    assert out.strip() == f"ERROR: {MINE}:14: NameError: name 'Missing' is not defined"
    assert status == pytest.ExitCode.USAGE_ERROR


def test_a_syntax_error_is_one_line(mine, edit):
    edit(MINE, "class Tally:", "class Tally")

    out, status, _ = mine("tests/ch01_sums")

    assert out.strip() == f"ERROR: {MINE}:14: syntax error: expected ':'"
    assert status == pytest.ExitCode.USAGE_ERROR


def test_a_chapter_that_is_not_started_says_how_to_start(mine):
    out, status, _ = mine("tests/ch12_more")

    assert out.strip() == "ERROR: there is no workspace/ch12/sums.py: run `python -m chapters start 12`"
    assert status == pytest.ExitCode.USAGE_ERROR


@pytest.mark.parametrize("folders", [[], ["tests/ch01_sums", "tests/ch12_more"]])
def test_one_chapter_must_be_named(mine, folders):
    out, _, _ = mine(*folders)

    assert out.strip() == "ERROR: --mine tests one chapter at a time, such as: pytest tests/ch01_sums --mine"


def test_a_module_imported_too_early_is_told(mine, root):
    (root / "tests" / "conftest.py").write_text(
        'import toy.sums\n\npytest_plugins = ["chapters.pytest_plugin"]\n', encoding="utf-8"
    )

    out, _, _ = mine("tests/ch01_sums")

    assert "ERROR: toy.sums was imported before it could be replaced" in out


def test_without_mine_the_final_modules_are_tested(python):
    out, status = python("-m", "pytest", "tests")

    assert status == 0
    assert "6 passed" in out
