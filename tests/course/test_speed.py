"""`python -m chapters speed`: the engine with the reader's files inside, beside the final modules."""

from __future__ import annotations

import json
import re

import pytest

from chapters import progress, speed, workspace
from chapters.__main__ import main
from chapters.manifest import CourseError, load_chapters

MINE = "workspace/ch01/sums.py"
GAP = 'raise NotImplementedError("01.1 Double: see chapters/01_sums")'
LADDER = """\
import json

from toy.sums import double

more = double.__code__.co_nlocals - 1  # a name more than the final module has
tokens = [[double(i) for i in range(10)]]
work = {"steps": 10, "tokens_computed": 30 + more, "tokens_reused": 0}
result = {"tokens": tokens, "seconds": 2.0, "work": work, "dtype": "float32", "device": "cpu", "prompt_tokens": 21}
print("result: " + json.dumps(result))
"""


@pytest.fixture
def first(root):
    """Chapter 1, started."""
    [chapter, _] = load_chapters(root)
    workspace.start(root, chapter)
    return chapter


@pytest.fixture
def ladder(root):
    """A benchmark of the course's toy engine, in place of `benchmarks.ladder`."""
    (root / "benchmarks").mkdir()
    (root / "benchmarks" / "__init__.py").touch()
    (root / "benchmarks" / "ladder.py").write_text(LADDER, encoding="utf-8")


def entry(yours: float = 8.0, final: float = 10.0, **changes) -> dict:
    work = {"rows": 3.0, "steps": 1.0}
    return {
        "device": "cpu", "dtype": "float32", "prompt_tokens": 21, "output_tokens": 10, "options": [], "rounds": 1,
        "date": "2025-01-02", "files": "", "yours": {"tokens_per_s": yours} | work,
        "final": {"tokens_per_s": final} | work,
    } | changes  # fmt: skip


def table(root, width: int = 80) -> str:
    return "\n".join(speed.table(root, load_chapters(root), width))


def test_both_engines_are_measured_and_the_readers_has_the_readers_files_inside(root, first, edit, ladder):
    edit(MINE, GAP, "y = x\n    return x + y")

    found = speed.measure(root, first, workspace.own_files(root, first), ["--requests", "4"], rounds=2)

    assert found["yours"] == {"tokens_per_s": 5.0, "rows": 3.1, "steps": 1.0}
    assert found["final"] == {"tokens_per_s": 5.0, "rows": 3.0, "steps": 1.0}


def test_the_engines_take_turns(root, first, edit, ladder):
    edit(MINE, GAP, "return x + x")
    told = []

    speed.measure(root, first, workspace.own_files(root, first), [], rounds=2, tell=told.append)

    assert [what.rpartition(" ")[2] for what in told] == ["yours", "final", "final", "yours"]


def test_an_engine_that_writes_other_tokens_has_no_speed(root, first, edit, ladder):
    edit(MINE, GAP, "return x * x")

    with pytest.raises(
        CourseError, match=r"writes other tokens than the final modules.* pytest tests/ch01_sums --mine"
    ):
        speed.measure(root, first, workspace.own_files(root, first), [], rounds=1)


def test_a_gap_in_the_engine_is_told_in_one_line(root, first, ladder, capsys):
    assert main(["speed", "1"], root) == 1

    assert capsys.readouterr().err == (
        "chapters: your engine of chapter 1 does not run: NotImplementedError: 01.1 Double: see chapters/01_sums\n"
    )


def test_speed_keeps_its_result_and_status_draws_it(root, first, edit, ladder, capsys):
    edit(MINE, GAP, "return x + x")

    assert main(["speed", "1"], root) == 0
    measured = capsys.readouterr().out
    main(["status"], root)

    row = " 1  Sums                     5.0    5.0   1.00          –  ██████████████"
    assert row in measured
    assert row in capsys.readouterr().out
    assert "one run each" in measured


def test_without_a_number_the_chapters_that_are_done_are_measured(root, first):
    chapters = load_chapters(root)
    with pytest.raises(CourseError, match="no chapter of the ladder is done yet"):
        speed.to_measure(root, chapters, None, "cpu")

    progress.record(root, dict.fromkeys(("01.1", "01.2", "01.3"), "done"), workspace.digests(root, first))

    assert speed.to_measure(root, chapters, None, "cpu") == [first]


@pytest.mark.parametrize(
    ("number", "device", "message"),
    [
        (12, "cpu", "no place on the ladder"),
        (6, "cpu", "made for a GPU: .* 6 --device cuda"),
        (6, "cuda", "there is no"),
    ],
)
def test_a_chapter_that_cannot_be_measured_says_why(root, number, device, message):
    with pytest.raises(CourseError, match=message):
        speed.to_measure(root, load_chapters(root), number, device)


def test_run_sends_a_benchmark_to_speed(root, first, capsys):
    assert main(["run", "1", "bench", "ladder"], root) == 1

    assert "python -m chapters speed 1" in capsys.readouterr().err


def test_a_bars_pale_end_is_what_the_final_modules_do_more(root, first):
    speed.save(root, first, entry(yours=5.0, final=10.0))

    assert f"{'█' * 7}[/][dim]{'░' * 7}[/]" in table(root)
    assert "0.50" in table(root)


def test_more_work_for_the_same_tokens_is_told(root, first):
    assert "work for each token" not in table(root)

    yours = {"tokens_per_s": 8.0, "rows": 12.25, "steps": 1.0}
    speed.save(root, first, entry(yours=8.0) | {"yours": yours})

    assert "work for each token: 12.2 rows and 1.00 steps, final 3.0 rows and 1.00 steps" in table(root)


def test_a_speed_of_files_that_were_edited_since_has_a_star(root, first, edit):
    files = speed.digest(workspace.own_files(root, first).values())
    speed.save(root, first, entry(files=files))
    assert "*" not in table(root)

    edit(MINE, "Small sums", "Smaller sums")

    assert "0.80*" in table(root)
    assert "* measured before you changed your files" in table(root)


@pytest.mark.parametrize(
    ("change", "shown"),
    [({}, True), ({"dtype": "bfloat16"}, False), ({"device": "cuda"}, False), ({"output_tokens": 9}, False)],
)
def test_the_reference_is_shown_where_the_work_and_the_device_are_the_same(root, first, change, shown):
    folder = root / "benchmarks" / "results"
    folder.mkdir(parents=True)
    row = {"prompt_tokens": 21, "output_tokens": 10, "tokens_per_s": 14.3}
    record = {"device": "a CPU of ours", "data": {"device": "cpu", "dtype": "float32", "chapters": {"1": row}}}
    (folder / "ladder.json").write_text(json.dumps(record), encoding="utf-8")

    speed.save(root, first, entry(**change))

    assert ("14.3" in table(root)) == shown
    assert ("the same work on a CPU of ours" in table(root)) == shown


@pytest.mark.parametrize("width", [34, 40, 60, 80, 120])
def test_no_line_of_the_speeds_is_wider_than_the_terminal(root, first, edit, width):
    edit("chapters/01_sums/chapter.yml", "title: Sums", f"title: {'Sums and more ' * 5}")
    speed.save(root, first, entry(yours=1234.5, final=2345.6))

    lines = table(root, width).splitlines()

    shown = [re.sub(r"\[[^\]]*\]", "", line) for line in lines if not line.startswith("[dim]")]  # notes may wrap
    assert max(map(len, shown)) <= width
