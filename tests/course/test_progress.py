"""What `status` knows and draws of the reader's work: outcomes and time spent."""

from __future__ import annotations

import json
import re

import pytest

from chapters import progress, workspace
from chapters.__main__ import main
from chapters.manifest import load_chapters

MINE = "workspace/ch01/sums.py"


@pytest.fixture
def first(root):
    """Chapter 1, started."""
    [chapter, _] = load_chapters(root)
    workspace.start(root, chapter)
    return chapter


def lines_of(text: str, *beginnings: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(beginnings)]


def test_time_counts_from_start_to_each_test_run(root, first):
    progress.mark(root, first, begins=True, now=1000)
    for now in (1000 + 300, 1000 + 300 + 600):
        progress.record(root, {"01.1": "failing"}, workspace.digests(root, first), now=now)

    assert progress.minutes(root, first) == 15


def test_a_long_gap_counts_for_twenty_minutes(root, first):
    progress.mark(root, first, begins=True, now=1000)
    progress.mark(root, first, now=1000 + 86_400)

    assert progress.minutes(root, first) == 20


def test_the_time_before_start_counts_for_no_chapter(root, first):
    [_, second] = load_chapters(root)
    progress.mark(root, first, begins=True, now=1000)
    workspace.start(root, second)
    progress.mark(root, second, begins=True, now=1600)

    assert [progress.minutes(root, chapter) for chapter in (first, second)] == [0, 0]


def test_a_minute_counts_for_one_chapter_only(root, first):
    [_, second] = load_chapters(root)
    workspace.start(root, second)
    progress.mark(root, first, begins=True, now=0)
    progress.mark(root, second, now=600)
    progress.mark(root, first, now=900)

    assert [progress.minutes(root, chapter) for chapter in (first, second)] == [5, 10]


def test_a_clock_that_was_set_back_takes_no_time_away(root, first):
    progress.mark(root, first, now=5000)
    progress.mark(root, first, now=5300)
    progress.mark(root, first, now=1000)

    assert progress.minutes(root, first) == 5


def test_reading_a_hint_of_a_chapter_that_is_not_started_leaves_no_mark(root):
    main(["hint", "01.1"], root)

    assert not (root / "workspace").exists()


@pytest.mark.parametrize("command", [["hint", "01.1"], ["solution", "01.1"], ["reset", "1"]])
def test_commands_of_a_chapter_leave_a_mark(root, first, command):
    progress.mark(root, first, begins=True, now=0)

    main(command, root)

    assert progress.minutes(root, first) == 20  # most of the gap since 1970


def test_a_reset_forgets_outcomes_but_not_the_time(root, first):
    progress.mark(root, first, begins=True, now=0)
    progress.record(root, {"01.1": "done"}, workspace.digests(root, first), now=600)

    progress.forget(root, first)

    assert progress.states(root, first)["01.1"] == "not run"
    assert progress.minutes(root, first) == 10


def test_a_file_of_before_time_was_kept_is_read_and_goes_on(root, first):
    digest = workspace.digests(root, first)["01.1"]
    (root / "workspace/progress.json").write_text(json.dumps({"01.1": ["done", digest]}), encoding="utf-8")

    assert progress.states(root, first)["01.1"] == "done"
    assert progress.minutes(root, first) == 0

    progress.mark(root, first, now=100)
    progress.mark(root, first, now=400)
    assert progress.states(root, first)["01.1"] == "done"
    assert progress.minutes(root, first) == 5


def test_each_state_has_a_sign_of_its_own_on_the_map(root, first, edit, capsys):
    digests = workspace.digests(root, first)
    progress.record(root, {"01.1": "done", "01.2": "failing", "01.3": "done"}, digests)
    edit(MINE, 'raise NotImplementedError("01.3 Count down: see chapters/01_sums")', "yield n")

    main(["status"], root)

    sums, more = lines_of(capsys.readouterr().out, " 1  ", "12  ")
    assert re.search(r"Sums +✓ ✗ ~ +1/3", sums)
    assert re.search(r"More +· +0/1", more)


def test_the_map_shows_minutes_beside_those_that_were_planned(root, first, capsys):
    progress.mark(root, first, begins=True, now=0)
    progress.mark(root, first, now=420)

    main(["status"], root)

    [sums] = lines_of(capsys.readouterr().out, " 1  ")
    assert sums.endswith("7 of about 5")


def test_the_next_task_is_pointed_at_by_name(root, first, capsys):
    progress.record(root, {"01.1": "done"}, workspace.digests(root, first))

    main(["status"], root)

    assert '→ o 01.2  Add "twice": not run' in capsys.readouterr().out


@pytest.mark.parametrize("width", [34, 40, 60, 80, 120])
def test_no_line_of_the_map_is_wider_than_the_terminal(root, first, edit, width):
    edit("chapters/01_sums/chapter.yml", "title: Sums", f"title: {'Sums and more ' * 5}")
    [chapter, _] = chapters = load_chapters(root)
    progress.mark(root, chapter, begins=True, now=0)
    progress.mark(root, chapter, now=9999)

    table = list(progress.course(root, chapters, width))

    shown = [re.sub(r"\[[^\]]*\]", "", line) for line in table if not line.startswith("[dim]")]  # notes may wrap
    assert max(map(len, shown)) <= width


def test_without_a_terminal_the_map_is_plain_text(root, first, python):
    out, status = python("-c", "from pathlib import Path; from chapters.__main__ import main; main(['status'], Path())")

    assert status == 0
    assert " 1  Sums o o o  0/3" in out
    assert "\x1b" not in out
