"""The formulas on the pages are Python, and hold."""

from __future__ import annotations

import doctest
import re
import textwrap
from pathlib import Path

import pytest

from chapters.manifest import load_chapters

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^( *)```pycon\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
PAGES = sorted((ROOT / "chapters").glob("**/*.md"))


def formulas(page: Path) -> str:
    """The examples of a page, in order; they share their names."""
    return "\n".join(textwrap.dedent(block) for _, block in BLOCK.findall(page.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "page", [*filter(formulas, PAGES)], ids=lambda page: page.relative_to(ROOT / "chapters").as_posix()
)
def test_what_a_page_computes_is_what_it_says(page):
    examples = doctest.DocTestParser().get_doctest(formulas(page), {}, page.parent.name, str(page), 0)
    told: list[str] = []
    failed, tried = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(examples, out=told.append)
    assert tried > 0
    assert failed == 0, "".join(told)


def test_every_chapter_has_formulas():
    without = [c.name for c in load_chapters(ROOT) if not formulas(ROOT / "chapters" / c.name / "index.md")]
    assert without == []


def test_no_example_stands_outside_the_blocks_that_are_run():
    loose = [page for page in PAGES if page.read_text("utf-8").count(">>>") != formulas(page).count(">>>")]
    assert loose == []
