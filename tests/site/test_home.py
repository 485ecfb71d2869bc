"""From the home page everything that a reader looks for first is at most two clicks away."""

from __future__ import annotations

import pytest

pytest.importorskip("mkdocs", reason="the site needs the extra `site`")

from bs4 import BeautifulSoup

pytestmark = pytest.mark.xdist_group("site")


@pytest.fixture(scope="module")
def home(site):
    return BeautifulSoup((site / "index.html").read_text(encoding="utf-8"), "html.parser").find("article")


def test_the_first_lines_lead_to_what_is_looked_for_most(home):
    first = home.find("a", string="Run it").find_parent("p")

    links = {link.get_text(): link["href"] for link in first.find_all("a")}

    assert links["Run it"] == "#two-commands"
    assert links["Speed"] == "#the-ladder"
    assert links["Glossary"] == "reference/glossary.html"
    assert links["Add your own model"] == "reference/extend.html#a-model"
    assert all(home.find(id=link[1:]) for link in links.values() if link.startswith("#"))


def test_the_course_has_a_row_with_a_link_for_each_chapter(home):
    table = home.find(id="the-course").find_next("table")

    chapters = [row.find("a")["href"] for row in table.find("tbody").find_all("tr")]

    assert "04_radix_reuse/index.html" in chapters
    assert [int(chapter[:2]) for chapter in chapters] == list(range(1, len(chapters) + 1))


def test_speed_is_shown_on_a_cpu_on_a_gpu_and_without_a_clock(home):
    tabs = home.find(class_="tabbed-set")

    assert [label.get_text() for label in tabs.find_all("label")] == ["CPU", "H200", "Work, without a clock"]
    figures = [tab.find("img")["src"].partition("-")[0] for tab in tabs.find_all(class_="tabbed-block")]
    assert figures == ["figures/ladder", "figures/ladder_offline", "figures/ladder_work"]


def test_the_table_of_speeds_has_a_row_for_each_engine_and_a_figure_with_its_peers(home, site):
    rows = home.find(class_="tabbed-set").find("table").find("tbody").find_all("tr")

    assert [row.find("td").get_text()[0] for row in rows] == list("12345678")
    drawing = (site / "figures/ladder_offline-light.svg").read_text(encoding="utf-8")
    assert all(peer in drawing for peer in ("mini-sglang", "nano-vllm", "vLLM", "what the memory allows"))
