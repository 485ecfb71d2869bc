"""The site as a reader meets it: in Chromium, at two widths, in light and dark."""

from __future__ import annotations

import shutil
from urllib.parse import urlparse

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("site")]  # one worker builds the site, once

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip

# What a reader cannot reach: it ends right of the window and nothing around it scrolls.
CUT = """() => {
  const scrolls = e => ["auto", "scroll"].includes(getComputedStyle(e).overflowX);
  const reachable = e => { for (; e; e = e.parentElement) if (scrolls(e)) return true; return false; };
  const cut = [];
  for (const e of document.querySelectorAll("article *")) {
    const box = e.getBoundingClientRect();
    if (box.width && box.right > innerWidth + 1 && !reachable(e)) cut.push(e.outerHTML.slice(0, 120));
    if (e.matches("pre, pre > code") && e.scrollWidth > e.clientWidth + 1 && e.clientWidth && !reachable(e))
      cut.push(e.textContent.slice(0, 120));
  }
  return cut.slice(0, 5);
}"""


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need playwright")
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        pytest.skip(f"no {', '.join(BROWSERS)} on this machine")
    with playwright.sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=executable, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser, url):
    """A function that opens a page of the site; at the end nothing may have gone wrong on any."""
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
    page.set_default_timeout(300_000)  # ms; on a busy machine a page takes its time, which is not what is tested
    problems: list[str] = []
    page.on("console", lambda m: problems.append(f"console: {m.text}") if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    page.on("requestfailed", lambda request: problems.append(f"failed: {request.url}"))
    page.on("response", lambda r: problems.append(f"{r.status}: {r.url}") if r.status >= 400 else None)
    page.on(
        "request",
        lambda r: (
            problems.append(f"leaves the site: {r.url}")
            if urlparse(r.url).scheme in ("http", "https") and not r.url.startswith(url)
            else None
        ),
    )

    def go(address: str):
        page.goto(url + address, wait_until="load")
        return page

    yield go
    page.close()
    assert not problems


def _addresses(site) -> list[str]:
    return sorted(path.parent.relative_to(site).as_posix() + "/" for path in site.rglob("index.html"))


def _follow_system(page, scheme: str) -> None:
    """Set the system's colour scheme and wait until the page has taken it over."""
    page.emulate_media(color_scheme=scheme)
    name = {"light": "default", "dark": "slate"}[scheme]
    page.wait_for_function("name => document.body.dataset.mdColorScheme === name", arg=name)


def test_no_page_overflows_or_cuts_code_at_1280_and_390_pixels_in_light_and_dark(visit, site):
    wrong = []
    for address in _addresses(site):
        page = visit(address.removeprefix("./"))
        page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        for width in (1280, 390):
            for scheme in ("light", "dark"):
                page.set_viewport_size({"width": width, "height": 900})
                _follow_system(page, scheme)
                where = f"{address} at {width} px, {scheme}"
                if (wide := page.evaluate("document.documentElement.scrollWidth")) > width:
                    wrong.append(f"{where}: the document is {wide} px wide")
                wrong += [f"{where}: {cut}" for cut in page.evaluate(CUT)]
    assert not wrong


def test_figures_follow_the_theme(visit):
    page = visit("")
    for scheme, other in (("light", "dark"), ("dark", "light")):
        _follow_system(page, scheme)
        assert page.locator(f'article img[src*="-{scheme}.svg"]').first.is_visible()
        assert not page.locator(f'article img[src*="-{other}.svg"]').first.is_visible()


def test_search_finds_rope(visit):
    page = visit("")
    page.get_by_placeholder("Search").first.click()
    page.keyboard.type("RoPE")
    first = page.locator(".md-search-result__item").first
    first.wait_for(state="visible")
    assert "RoPE" in page.locator(".md-search-result__list").inner_text()
