"""The reader's files and the commands that make them."""

from __future__ import annotations

import pytest

from chapters import progress, workspace
from chapters.__main__ import main
from chapters.manifest import CourseError, load_chapters

MINE = "workspace/ch01/sums.py"
MAIN = "import sys; from pathlib import Path; from chapters.__main__ import main; sys.exit(main(root=Path.cwd()))"


def test_start_writes_one_file_a_module_and_says_what_to_do(root, capsys):
    assert main(["start", "1"], root) == 0

    assert "NotImplementedError" in (root / MINE).read_text(encoding="utf-8")
    out = capsys.readouterr().out
    assert MINE in out
    assert "pytest tests/ch01_sums --mine" in out


def test_start_never_overwrites(root, capsys):
    main(["start", "1"], root)
    (root / MINE).write_text("my work", encoding="utf-8")

    assert main(["start", "1"], root) == 1

    assert (root / MINE).read_text(encoding="utf-8") == "my work"
    assert capsys.readouterr().err.count("\n") == 1


def test_reset_keeps_every_earlier_version_and_forgets_the_outcomes(root):
    [chapter, _] = load_chapters(root)
    main(["start", "1"], root)
    for text in ("first", "second"):
        (root / MINE).write_text(text, encoding="utf-8")
        progress.record(root, {"01.1": "done"}, workspace.digests(root, chapter))
        assert main(["reset", "1"], root) == 0

    assert (root / "workspace/ch01.backup-1/sums.py").read_text(encoding="utf-8") == "first"
    assert (root / "workspace/ch01.backup-2/sums.py").read_text(encoding="utf-8") == "second"
    assert "NotImplementedError" in (root / MINE).read_text(encoding="utf-8")
    assert progress.states(root, chapter)["01.1"] == "not run"


def test_modules_of_the_same_name_get_files_of_their_own(root, edit):
    (root / "other").mkdir()
    (root / "other" / "sums.py").write_text('def double(x):\n    """Two."""\n    return 2 * x\n', encoding="utf-8")
    edit("chapters/01_sums/chapter.yml", "toy.sums:double", "other.sums:double")
    [chapter, _] = load_chapters(root)

    names = {module: path.name for module, path in workspace.files(root, chapter).items()}

    assert names == {"other.sums": "other_sums.py", "toy.sums": "toy_sums.py"}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("class Tally:", "class Tally", "workspace/ch01/sums.py:14: syntax error: expected ':'"),
        ("def double(x: int)", "def double(y: int)", r"sums.py:9: double takes \(y\), .* with \(x\)"),
        ("*, times: int = 1", "times: int = 1", r"Tally.add takes \(self, x, times\), .* \(self, x, \*, times\)"),
        ("def double", "def twice", r"there is no double any more; task 01.1 is the body of double\(x\)"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_in_one_line(root, edit, old, new, message):
    [chapter, _] = load_chapters(root)
    workspace.start(root, chapter)
    edit(MINE, old, new)

    with pytest.raises(CourseError, match=message) as caught:
        workspace.own_files(root, chapter)
    assert "\n" not in str(caught.value)


def test_earlier_chapters_fill_in_for_modules_the_chapter_does_not_have(root, edit):
    (root / "toy" / "more.py").write_text('def halve(x):\n    """Half."""\n    return x / 2\n', encoding="utf-8")
    edit("chapters/12_more/chapter.yml", "toy.sums:halve", "toy.more:halve")
    first, last = load_chapters(root)
    workspace.start(root, first)
    workspace.start(root, last)

    assert workspace.files_up_to(root, [first, last], last) == {
        "toy.sums": root / "workspace/ch01/sums.py",
        "toy.more": root / "workspace/ch12/more.py",
    }
    assert workspace.files_up_to(root, [first, last], first) == {"toy.sums": root / "workspace/ch01/sums.py"}


def test_the_later_chapters_file_of_a_module_wins(root):
    first, last = load_chapters(root)
    workspace.start(root, first)
    workspace.start(root, last)

    assert workspace.files_up_to(root, [first, last], last) == {"toy.sums": root / "workspace/ch12/sums.py"}


def test_an_earlier_file_is_not_used_where_a_later_chapter_with_tasks_in_its_module_is_not_started(root):
    folder = root / "chapters" / "13_most"
    folder.mkdir()
    table = (root / "chapters/12_more/chapter.yml").read_text(encoding="utf-8")
    (folder / "chapter.yml").write_text(
        table.replace("12.1", "13.1").replace("sums:halve", "more:most"), encoding="utf-8"
    )
    (root / "toy" / "more.py").write_text("def most(x):\n    return x\n", encoding="utf-8")
    first, middle, last = load_chapters(root)
    workspace.start(root, first)
    workspace.start(root, last)
    own = {"toy.more": root / "workspace/ch13/more.py"}

    assert workspace.files_up_to(root, [first, middle, last], last) == own

    workspace.start(root, middle)

    assert workspace.files_up_to(root, [first, middle, last], last) == {
        "toy.sums": root / "workspace/ch12/sums.py",
        **own,
    }


@pytest.mark.parametrize(
    ("old", "new"),
    [("return x + x", "return x - x"), ("def double", "def twice"), ("class Tally:", "class Tally")],
)
def test_a_result_is_stale_once_its_code_is_edited(root, edit, old, new):
    [chapter, _] = load_chapters(root)
    workspace.start(root, chapter)
    edit(MINE, 'raise NotImplementedError("01.1 Double: see chapters/01_sums")', "return x + x")
    progress.record(root, {"01.1": "done"}, workspace.digests(root, chapter))

    edit(MINE, old, new)

    assert progress.states(root, chapter)["01.1"] == "changed"


def test_a_result_stays_when_only_another_tasks_body_is_edited(root, edit):
    [chapter, _] = load_chapters(root)
    workspace.start(root, chapter)
    progress.record(root, {"01.1": "done"}, workspace.digests(root, chapter))

    edit(MINE, 'raise NotImplementedError("01.3 Count down: see chapters/01_sums")', "yield n")

    assert progress.states(root, chapter)["01.1"] == "done"


def test_status_shows_each_task_and_the_next_one(root, capsys):
    chapter = load_chapters(root)[0]
    workspace.start(root, chapter)
    progress.record(root, {"01.1": "done", "01.2": "failing"}, workspace.digests(root, chapter))

    main(["status"], root)

    out = capsys.readouterr().out
    sums, more = (line for line in out.splitlines() if line[:4] in (" 1  ", "12  "))
    assert sums.split()[:6] == ["1", "Sums", "✓", "✗", "o", "1/3"]
    assert more.split()[:4] == ["12", "More", "·", "0/1"]
    assert 'next: 01.2 Add "twice"' in out


def test_hints_come_one_at_a_time(root, capsys):
    main(["hint", "01.1"], root)
    first = capsys.readouterr().out
    main(["hint", "01.1", "2"], root)
    second = capsys.readouterr().out

    assert "Add it to itself" not in first
    assert "Add it to itself" in second
    assert main(["hint", "01.1", "3"], root) == 1


def test_the_solution_is_the_engines_own_code(root, capsys):
    main(["solution", "01.1"], root)

    out = capsys.readouterr().out
    assert "toy/sums.py:9" in out
    assert "return x + x" in out


@pytest.mark.parametrize("args", [["start", "9"], ["run", "9", "chat"], ["solution", "01.9"], ["check", "9"]])
def test_an_unknown_chapter_or_task_ends_with_one_line(root, capsys, args):
    assert main(args, root) == 1

    assert capsys.readouterr().err.startswith("chapters: there is no ")


def test_run_puts_the_readers_files_into_the_engine(root, edit, python):
    (root / "minisgl").mkdir()
    (root / "minisgl" / "__init__.py").touch()
    (root / "minisgl" / "cli.py").write_text(
        "from toy.sums import triple\n\n\ndef main(argv):\n    print(argv, triple(5))\n", encoding="utf-8"
    )
    workspace.start(root, load_chapters(root)[0])
    edit(MINE, 'raise NotImplementedError("01.1 Double: see chapters/01_sums")', "return 100")

    out, status = python("-c", MAIN, "run", "1", "generate", "Hello", "--stats")

    assert "['generate', '--chapter', '1', 'Hello', '--stats'] 105" in out
    assert "workspace/ch01/sums.py in place of toy.sums" in out
    assert status == 0


def test_run_tells_in_one_line_why_a_file_cannot_be_imported(root, edit, python):
    workspace.start(root, load_chapters(root)[0])
    edit(MINE, "import contextlib", "import contextlip")

    out, status = python("-c", MAIN, "run", "1", "chat")

    assert out.splitlines()[1:] == [
        "chapters: workspace/ch01/sums.py:5: ModuleNotFoundError: No module named 'contextlip'"
    ]
    assert status == 1


def test_a_chapter_that_is_no_number_is_told(root, capsys):
    with pytest.raises(SystemExit):
        main(["start", "foo"], root)

    assert "'foo' is not a chapter's number, such as 1" in capsys.readouterr().err
