"""What the site's pages get after they are rendered: links from terms to the glossary, and from notebooks to pages.

Loaded by mkdocs (`hooks`). Works on HTML, where code, headings and links can be told from prose.
"""

from __future__ import annotations

import functools
import html
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from bs4 import BeautifulSoup, NavigableString, Tag
from markdown.extensions.toc import slugify
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).resolve().parents[1]
GLOSSARY = "reference/glossary.md"
NO_PROSE = ("a", "code", "figure", "h1", "h2", "h3", "pre", "script", "small", "summary", "table")
NO_PROSE_CLASSES = ("admonition-title", "grid", "tabbed-labels")
ORDINARY = ("Event", "Floor", "Nobody", "Piece", "Program", "Q", "K", "V")  # mostly meant as in any other text
_ENTRY = re.compile(r"^## (?P<titles>.+)\n+(?P<meaning>.+?)(?: Chapter (?P<chapter>\d+)\.)?$", re.MULTILINE)
_PAGE = re.compile(r'href="\.\./chapters/(?P<source>[^"#]+\.md)')
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")


class Term(NamedTuple):
    """An entry of the glossary."""

    anchor: str
    meaning: str  # plain text
    chapter: int  # that introduces it; 0 if none does


@functools.cache
def terms() -> dict[str, Term]:
    """The glossary's entries by term; an entry such as `lru, lfu, fifo` has several."""
    found = {}
    for entry in _ENTRY.finditer((ROOT / "chapters" / GLOSSARY).read_text(encoding="utf-8")):
        meaning = _LINK.sub(r"\1", entry["meaning"]).replace("`", "")
        for term in entry["titles"].split(", "):
            found[term] = Term(slugify(entry["titles"], "-"), meaning, int(entry["chapter"] or 0))
    return found


def _pattern(names: Iterable[str]) -> re.Pattern[str]:
    """Any of the terms, in the singular or the plural; the longest first, so that `page table` is not a `page`.

    "This page" is the one being read.
    """
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile(rf"(?<![\w-])(?<![Tt]his )({'|'.join(map(_spelled, longest_first))})(?:e?s)?(?![\w-])")


def _spelled(term: str) -> str:
    """A term as prose writes it: a first letter may be small or capital, unless the term is a name such as RoPE."""
    if len(term) < 2 or term[1:] != term[1:].lower():
        return re.escape(term)
    return f"[{term[0].lower()}{term[0].upper()}]{re.escape(term[1:])}"


def link_terms(page: str, glossary_url: str, chapter: int | None = None) -> str:
    """The page, with the first use of each term in its prose linked to the glossary.

    In a chapter no term of a later one is linked: before chapter 3, a page is a page of this site.
    """
    known = {name.lower(): term for name, term in terms().items() if chapter is None or term.chapter <= chapter}
    pattern = _pattern(name for name in terms() if name.lower() in known and name not in ORDINARY)
    soup = BeautifulSoup(page, "html.parser")
    linked = {str(link["href"]).partition("#")[2] for link in soup.select("a[href*='glossary']")}

    def link(use: re.Match[str]) -> str:
        term = known[use[1].lower()]
        if term.anchor in linked:
            return use[0]
        linked.add(term.anchor)
        return f'<a class="term" href="{glossary_url}#{term.anchor}" title="{html.escape(term.meaning)}">{use[0]}</a>'

    for text in soup.find_all(string=pattern):
        if _is_prose(text):
            text.replace_with(BeautifulSoup(pattern.sub(link, html.escape(text, quote=False)), "html.parser"))
    return str(soup)


def _is_prose(text: NavigableString) -> bool:
    return type(text) is NavigableString and not any(
        parent.name in NO_PROSE or set(parent.get("class", ())) & set(NO_PROSE_CLASSES)
        for parent in text.parents
        if isinstance(parent, Tag)
    )


def link_pages(notebook: str, url: str, urls: Mapping[str, str]) -> str:
    """A rendered notebook whose links to pages' sources, as Jupyter follows them, lead to the pages of the site.

    Raises:
        KeyError: there is no such page.
    """
    return _PAGE.sub(lambda link: f'href="{get_relative_url(urls[link["source"]], url)}', notebook)


@event_priority(100)  # before the macros
def on_page_markdown(markdown: str, /, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Called by mkdocs with a page's source. A notebook is no template, whatever braces stand in its code."""
    if page.file.src_uri.startswith("notebooks/"):
        page.meta["render_macros"] = False
    return markdown


def on_page_content(content: str, /, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Called by mkdocs with a page's rendered content."""
    folder, _, name = page.file.src_uri.rpartition("/")
    if folder == "notebooks":
        return link_pages(content, page.url, {uri: file.url for uri, file in files.src_uris.items()})
    if name.startswith(("api", "glossary")):
        return content
    glossary = files.get_file_from_path(GLOSSARY)
    assert glossary is not None
    chapter = int(folder[:2]) if folder[:2].isdecimal() else None
    return link_terms(content, get_relative_url(glossary.url, page.url), chapter)
