from __future__ import annotations

import pytest

pytest.importorskip("mkdocs", reason="the site needs the extra `site`")

from bs4 import BeautifulSoup

from chapters import hooks


@pytest.fixture(autouse=True)
def glossary(tmp_path, monkeypatch):
    (tmp_path / "chapters/reference").mkdir(parents=True)
    (tmp_path / "chapters" / hooks.GLOSSARY).write_text(
        "# Glossary\n\n"
        "## Page\n\nSome `slots` for [K](x.md). Chapter 3.\n\n"
        "## Page table\n\nThe pages of a request. Chapter 3.\n\n"
        "## Prompt\n\nThe tokens that a request brings.\n\n"
        "## RoPE\n\nA rotation. Chapter 1.\n\n"
        "## top-k, top-p\n\nCuts. Chapter 1.\n"
    )
    monkeypatch.setattr(hooks, "ROOT", tmp_path)
    hooks.terms.cache_clear()
    yield
    hooks.terms.cache_clear()


def links(html: str, chapter: int | None = None) -> list[tuple[str, str]]:
    soup = BeautifulSoup(hooks.link_terms(html, "../glossary.html", chapter), "html.parser")
    return [(a.get_text(), a["href"].removeprefix("../glossary.html")) for a in soup.select("a.term")]


def test_the_first_use_of_a_term_is_linked_and_the_second_is_not():
    assert links("<p>A page here,</p><p>and a page there.</p>") == [("page", "#page")]


def test_a_term_is_known_in_the_plural_and_with_a_capital_and_the_longer_term_wins():
    assert links("<p>Page tables, pages and prompts.</p>") == [
        ("Page tables", "#page-table"), ("pages", "#page"), ("prompts", "#prompt"),
    ]  # fmt: skip


def test_a_name_is_spelled_as_the_glossary_spells_it():
    assert links("<p>a rope, a RoPE</p>") == [("RoPE", "#rope")]


def test_terms_of_one_entry_share_its_anchor():
    assert links("<p>top-p</p>") == [("top-p", "#top-k-top-p")]


@pytest.mark.parametrize("html", ["<code>page</code>", "<a href='x'>page</a>", "<h2>page</h2>", "homepage page-size"])
def test_code_links_headings_and_parts_of_words_are_left_alone(html):
    assert links(html) == []


def test_a_term_is_not_linked_before_the_chapter_that_introduces_it():
    assert links("<p>prompt and page</p>", chapter=2) == [("prompt", "#prompt")]
    assert links("<p>prompt and page</p>", chapter=3) == [("prompt", "#prompt"), ("page", "#page")]


def test_a_link_that_an_author_wrote_counts_as_the_first_use():
    assert links("<p><a href='../reference/glossary.html#page'>A page</a> is a page.</p>") == []


def test_a_reader_who_points_at_a_term_sees_its_meaning():
    assert 'title="Some slots for K."' in hooks.link_terms("<p>page</p>", "g")


def test_markup_in_the_text_stays_text():
    assert "&lt;b&gt; &amp; " in hooks.link_terms("<p>&lt;b&gt; &amp; page</p>", "g")
