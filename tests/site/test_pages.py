"""The built HTML, without a browser."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse

import pytest

pytest.importorskip("bs4", reason="the site needs the extra `site`")

from bs4 import BeautifulSoup

from chapters.manifest import load_chapters

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.xdist_group("site")


@dataclass
class _Page(HTMLParser):
    """What a page defines and what it needs."""

    path: Path
    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)  # fetched without a click

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if "src" in values:
            self.loads.append(values["src"])
        if "href" in values:
            (self.links if tag == "a" else self.loads).append(values["href"])


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, _Page]:
    paths = (path for path in site.rglob("*.html") if path.name != "404.html")  # made for a server's root
    return {path: _Page(path) for path in paths}


def test_every_chapter_has_its_page_and_its_notebook(site):
    for chapter in load_chapters(ROOT):
        assert (site / chapter.name / "index.html").is_file()
        assert (site / "notebooks" / f"{chapter.name}.html").is_file()


def test_every_task_has_its_box_and_its_solution_on_its_chapters_page(site):
    for chapter in load_chapters(ROOT):
        html = (site / chapter.name / "index.html").read_text(encoding="utf-8")
        for task in chapter.tasks:
            assert f'id="task-{task.id}"' in html, f"{chapter.name} lacks task({task.id!r})"
            assert f"Solution {task.id} " in html, f"{chapter.name} lacks solution({task.id!r})"


def test_every_internal_link_leads_to_a_page_and_an_anchor_that_exist(pages, site):
    broken = []
    for page in pages.values():
        for link in page.links:
            address, anchor = urldefrag(link)
            if urlparse(address).scheme or address.startswith("//"):
                continue
            target = (page.path.parent / unquote(address)).resolve() if address else page.path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (anchor and target in pages and unquote(anchor) not in pages[target].ids):
                broken.append(f"{page.path.relative_to(site)}: {link}")
    assert not broken


def test_every_image_script_and_stylesheet_is_in_the_site(pages, site):
    missing = []
    for page in pages.values():
        for load in page.loads:
            address = unquote(urldefrag(load)[0])
            if address.startswith("data:"):
                continue
            if not (page.path.parent / address).exists():
                missing.append(f"{page.path.relative_to(site)}: {load}")
    assert not missing


@pytest.mark.parametrize(
    "sought",
    [
        "index.html#two-commands",
        "04_radix_reuse/index.html",
        "reference/glossary.html",
        "index.html#the-ladder",
        "reference/extend.html",
    ],
)
def test_what_readers_look_for_is_at_most_two_clicks_from_the_text_of_the_home_page(site, sought):
    def links(page: Path) -> set[str]:
        article = BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser").article
        found = {urldefrag(a["href"])[0] for a in article.select("a[href]") if not urlparse(a["href"]).scheme}
        targets = ((page.parent / unquote(link)).resolve() for link in found if link)
        return {target.relative_to(site.resolve()).as_posix() for target in targets if target.suffix == ".html"}

    home = links(site / "index.html")
    address, anchor = urldefrag(sought)
    assert address == "index.html" or address in home.union(*(links(site / page) for page in home))
    assert not anchor or f'id="{anchor}"' in (site / address).read_text(encoding="utf-8")


def test_sources_of_the_course_machine_are_not_published(site):
    assert not [path for path in site.rglob("*") if path.suffix in {".py", ".yml"}]


def test_the_glossary_is_in_alphabetical_order():
    text = (ROOT / "chapters/reference/glossary.md").read_text(encoding="utf-8")
    terms = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    assert terms == sorted(terms, key=str.lower)


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_shows_no_warning_and_no_path_of_the_machine_it_ran_on(path):
    outputs = [o for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] for o in cell.get("outputs", [])]
    texts = ["".join(o.get("text", o.get("data", {}).get("text/plain", ""))) for o in outputs]

    assert [o["text"] for o in outputs if o.get("name") == "stderr"] == []
    assert [text for text in texts if "site-packages" in text or str(ROOT) in text] == []
