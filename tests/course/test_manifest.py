"""The chapters' tables."""

from __future__ import annotations

import pytest

from chapters.manifest import CourseError, find_chapter, find_task, load_chapters


def test_chapters_come_in_order_whatever_their_numbers(root):
    assert [(c.number, c.name, c.test_folder) for c in load_chapters(root)] == [
        (1, "01_sums", "tests/ch01_sums"),
        (12, "12_more", "tests/ch12_more"),
    ]


def test_a_task_is_found_by_its_id_with_or_without_the_leading_zero(root):
    chapters = load_chapters(root)

    assert find_task(chapters, "01.2")[1].qualname == "Tally.add"
    assert find_task(chapters, "1.2") == find_task(chapters, "01.2")


def test_an_unknown_chapter_or_task_is_named(root):
    chapters = load_chapters(root)

    with pytest.raises(CourseError, match="no chapter 3; there are 1, 12"):
        find_chapter(root, chapters, 3)
    with pytest.raises(CourseError, match=r"no task 01\.9"):
        find_task(chapters, "01.9")


def test_a_planned_chapter_is_said_to_be_planned(root):
    (root / "chapters" / "planned.yml").write_text("3: {title: Paged sums, builds: pages}", encoding="utf-8")

    with pytest.raises(CourseError, match="chapter 3, Paged sums, is not written yet; there are 1, 12"):
        find_chapter(root, load_chapters(root), 3)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("tier: cpu", "tier: abacus", "tier is 'abacus', but must be one of cpu, interpreter, gpu, multi-gpu"),
        ("minutes: 5", "minutes: long", "minutes is 'long', but must be of type int"),
        ("title: Sums", "titel: Sums", "titel is not a known key|title is missing"),
        ("    lines: 1\n", "", "task 1: lines is missing"),
        ('id: "01.2"', 'id: "01.3"', "task 2 has the id '01.3', but must have '01.2'"),
        ("[Add, Add it to itself]", "[{Add: it}, b]", "task 1: hints holds more than text"),
        ("title: Sums", "title: [", "chapter.yml: while parsing"),
    ],
)
def test_a_mistake_in_a_table_is_one_line_that_names_the_file(root, edit, old, new, message):
    edit("chapters/01_sums/chapter.yml", old, new)

    with pytest.raises(CourseError, match=message) as caught:
        load_chapters(root)
    assert str(caught.value).startswith("chapters/01_sums/chapter.yml")
    assert "\n" not in str(caught.value)


def test_a_mutant_of_another_chapters_task_is_refused(root, edit):
    edit("chapters/01_sums/mutants.yml", 'task: "01.3"', 'task: "12.1"')

    with pytest.raises(CourseError, match=r"mutant 2 is of task '12\.1'"):
        load_chapters(root)
