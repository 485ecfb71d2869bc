"""The course check, on a course that is sound and on the ways in which one is not."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from chapters import runs
from chapters.check import check
from chapters.manifest import load_chapters


@pytest.fixture
def first_chapter(root, monkeypatch):
    """Check chapter 1; what was printed, and whether all is well."""
    monkeypatch.setattr(runs, "PRELOAD", ["pytest", "hypothesis"])

    def first_chapter() -> tuple[str, bool]:
        screen = StringIO()
        sound = check(root, load_chapters(root)[:1], Console(file=screen, width=200))
        return screen.getvalue(), sound

    return first_chapter


def test_a_sound_chapter_is_one_line(first_chapter):
    text, sound = first_chapter()

    assert text == ("01 sums  stubs: 3 of 3 fail with our message · final modules pass · mutants: 2 of 2 caught\n")
    assert sound


def test_final_modules_that_fail_are_shown(first_chapter, edit):
    edit("toy/sums.py", "return x + x", "return x + x + 1")
    edit("chapters/01_sums/mutants.yml", "replace: x + x", "replace: x + x + 1")

    text, sound = first_chapter()

    assert "final modules fail" in text
    assert "FAILED tests/ch01_sums/test_double.py::test_double[0]" in text
    assert not sound


def test_a_mutant_that_the_tests_accept_is_named(first_chapter, edit):
    edit("chapters/01_sums/mutants.yml", "with: x * x", "with: 2 * x")

    text, sound = first_chapter()

    assert "mutants: 1 of 2 caught" in text
    assert "mutant 1 of 01.1 (Squares) is not caught: the tests pass" in text
    assert not sound


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("replace: x + x", "replace: x - x", "stands 0 times in toy.sums:double, but must stand there once"),
        ("replace: x + x", "replace: x", "stands 4 times in toy.sums:double"),
        ("with: x * x", "with: x *", "it is not Python: line 12"),
        ("toy.sums:double", "toy.sums:treble", "defines no 'treble'"),
    ],
)
def test_a_mutant_that_does_not_apply_is_an_error(first_chapter, edit, old, new, message):
    edit("chapters/01_sums/mutants.yml", old, new)

    text, sound = first_chapter()

    assert "mutants: 1 of 2 caught" in text
    assert message in text
    assert not sound


def test_a_mutant_that_breaks_the_import_does_not_count_as_caught(first_chapter, edit):
    edit("chapters/01_sums/mutants.yml", "replace: x + x\n  with: x * x", "replace: 'def double'\n  with: 'def twice'")

    text, _ = first_chapter()

    assert "mutants: 1 of 2 caught" in text
    assert "(Squares) is not caught: pytest ends with interrupted, not with test results" in text
    assert "cannot import name 'double'" in text


def test_a_module_that_cannot_be_imported_says_why(first_chapter, edit):
    edit(
        "chapters/01_sums/mutants.yml", "replace: x + x\n  with: x * x", "replace: 'x: int'\n  with: 'x: int = missing'"
    )

    text, _ = first_chapter()

    assert "toy.sums cannot be imported: NameError: name 'missing' is not defined" in text


def test_a_test_that_passes_without_the_readers_work_is_told(first_chapter, edit):
    edit("tests/ch01_sums/test_rest.py", "list(sums.countdown(3)) == [3, 2, 1]", "sums")

    text, sound = first_chapter()

    assert "stubs: 2 of 3" in text
    assert "01.3: all tests pass though it is not written" in text
    assert not sound


def test_a_task_whose_tests_need_a_later_task_is_told(first_chapter, edit):
    edit("tests/ch01_sums/test_double.py", "triple(3) == 9", "list(__import__('toy.sums').sums.countdown(1))")

    text, _ = first_chapter()

    assert "stubs: 2 of 3" in text
    assert "test_triple fails without the message of this task or an earlier one" in text


def test_a_task_that_cannot_pass_before_a_later_one_is_written_is_told(first_chapter, edit):
    edit(
        "tests/ch01_sums/test_double.py",
        "triple(3) == 9",
        "triple(3) == 9 and __import__('toy.sums').sums.countdown(1)",
    )

    text, sound = first_chapter()

    assert "stubs: 3 of 3" in text
    assert "with the tasks up to 01.1: tests fail" in text
    assert "01.3 Count down" in text
    assert not sound


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("chapter.yml", "[Loop, Loop and add]", "[Loop]", "01.2 has 1 hints, but must have two"),
        ("chapter.yml", "lines: 1", "lines: 9", "chapter.yml expects 9 lines, but the engine's body has 1"),
        ("index.md", 'task("01.2")', "", 'index.md has no task("01.2")'),
        ("index.md", 'solution("01.3")', "", 'index.md has no solution("01.3")'),
    ],
)
def test_what_a_task_lacks_is_told(first_chapter, edit, name, old, new, message):
    edit(f"chapters/01_sums/{name}", old, new)

    text, sound = first_chapter()

    assert message in text
    assert not sound


SKIP_ONE = ("def test_countdown", "@__import__('pytest').mark.skip(reason='no moon')\ndef test_countdown")
SKIP_FILE = (
    "from toy import sums",
    "import pytest\n\npytest.skip('no moon', allow_module_level=True)\nfrom toy import sums",
)


@pytest.mark.parametrize(("old", "new"), [SKIP_ONE, SKIP_FILE])
def test_a_task_whose_tests_are_all_skipped_is_not_checked(first_chapter, edit, old, new):
    edit("tests/ch01_sums/test_rest.py", old, new)

    text, sound = first_chapter()

    assert "final modules pass · mutants: 1 of 2 caught\n" in text
    assert "stubs: 01.3: its tests were skipped: no moon" in text
    assert "mutant 2 of 01.3 (Counts to zero) is not caught: its tests were skipped: no moon" in text
    assert not sound


@pytest.mark.parametrize(("old", "new"), [SKIP_ONE, SKIP_FILE])
def test_skipped_tests_are_no_fault_where_the_machine_lacks_what_the_chapter_runs_on(
    first_chapter, edit, monkeypatch, old, new
):
    edit("chapters/01_sums/chapter.yml", "tier: cpu", "tier: interpreter")
    edit("tests/ch01_sums/test_rest.py", old, new)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    text, sound = first_chapter()

    assert text.endswith("final modules pass · mutants: 1 of 2 caught, 1 not tried: triton is not installed\n")
    assert sound


def test_a_test_that_does_not_exist_is_named(first_chapter, edit):
    edit("chapters/01_sums/chapter.yml", "test_rest.py::test_add", "test_rest.py::test_and")

    text, sound = first_chapter()

    assert "final modules: there is no test tests/ch01_sums/test_rest.py::test_and" in text
    assert not sound


def test_runs_work_where_processes_cannot_be_forked(root, monkeypatch):
    monkeypatch.setattr(runs.multiprocessing, "get_all_start_methods", lambda: ["spawn"])

    [(_, outcome)] = runs.run_all(root, {"sums": runs.Run(("tests/ch01_sums",), {})}, timeout_s=600)

    assert "5 passed" in outcome.output


def test_a_run_that_never_ends_is_said_to_hang(root):
    (root / "tests" / "test_loop.py").write_text("def test_loop():\n    while True:\n        pass\n", encoding="utf-8")

    [(_, outcome)] = runs.run_all(root, {"loop": runs.Run(("tests/test_loop.py",), {})}, timeout_s=0.5)

    assert outcome.error == "it hangs: no result after 0.5 s"


def test_a_process_that_dies_is_told(root):
    (root / "tests" / "test_exit.py").write_text("import os\n\n\ndef test_exit():\n    os._exit(0)\n", encoding="utf-8")

    [(_, outcome)] = runs.run_all(root, {"exit": runs.Run(("tests/test_exit.py",), {})}, timeout_s=60)

    assert outcome.error == "the process died"
