"""The course's own tables, as far as reading them goes; `python -m chapters check` runs the tests as well."""

from __future__ import annotations

import pytest

from chapters import symbols
from chapters.manifest import Chapter, load_chapters
from chapters.mutants import mutate
from chapters.stubs import stub
from chapters.symbols import ROOT

CHAPTERS = load_chapters(ROOT)


def test_there_are_chapters():
    assert [chapter.number for chapter in CHAPTERS[:2]] == [1, 2]


def test_the_first_chapters_ops_have_no_gaps_of_later_chapters():
    text = stub(ROOT, CHAPTERS[0], "minisgl_kernels.reference")

    gaps = text.count("raise NotImplementedError")
    assert gaps == 3, "the engine of chapter 3 calls all ops, with the reader's file of chapter 1 inside"


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.name)
def test_every_stub_is_a_program_and_holds_each_tasks_message(chapter: Chapter):
    stubs = {module: stub(ROOT, chapter, module) for module in chapter.modules}

    for module, text in stubs.items():
        symbols.language(symbols.module_path(ROOT, module)).check(text, module)
    for task in chapter.tasks:
        assert chapter.message(task) in stubs[task.module]


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.name)
def test_every_mutant_still_applies(chapter: Chapter):
    assert len(chapter.mutants) >= 5
    for mutant in chapter.mutants:
        mutate(ROOT, mutant)
