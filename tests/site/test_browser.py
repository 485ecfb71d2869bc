"""The site as a reader meets it: in Chromium, at two widths, in light and dark."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("site")]  # one worker builds the site, once

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

WEIGHTS = """() => Object.fromEntries(
  performance.getEntries().filter(e => "encodedBodySize" in e).map(e => [e.name, e.encodedBodySize]))"""

SHIFT = """() => new Promise(resolve => {
  let sum = 0;
  new PerformanceObserver(list => list.getEntries().forEach(e => { if (!e.hadRecentInput) sum += e.value; }))
    .observe({ type: "layout-shift", buffered: true });
  requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(() => resolve(sum), 100)));
})"""


def _addresses(site) -> list[str]:
    return sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html") if path.name != "404.html")


def _pages(site) -> list[str]:
    """All but rendered notebooks, whose weight and colours are Jupyter's."""
    return [address for address in _addresses(site) if not address.startswith("notebooks/")]


def _follow_system(page, scheme: str) -> None:
    """Set the system's colour scheme and wait until the page has taken it over."""
    page.emulate_media(color_scheme=scheme)
    name = {"light": "default", "dark": "slate"}[scheme]
    page.wait_for_function("name => document.body.dataset.mdColorScheme === name", arg=name)


def test_no_page_overflows_or_cuts_code_at_1280_and_390_pixels_in_light_and_dark(visit, site):
    wrong = []
    for address in _addresses(site):
        page = visit(address)
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


def test_a_page_weighs_less_than_a_megabyte_with_all_that_it_loads(visit, site):
    """What a reader's connection carries for the page; the index of the search comes behind it."""
    heavy = {}
    for address in _pages(site):
        page = visit(address)
        weights = page.evaluate(WEIGHTS)
        total = sum(size for name, size in weights.items() if "search_index" not in name)
        if total >= 1_000_000:
            heavy[address] = total
    assert heavy == {}


def test_nothing_moves_while_a_page_loads(visit, site):
    """Cumulative layout shift; 0.1 is where Lighthouse stops calling it good."""
    moving = {}
    for address in _pages(site):
        page = visit(address)
        if (shift := page.evaluate(SHIFT)) >= 0.1:
            moving[address] = shift
    assert moving == {}


def test_text_has_contrast_and_controls_have_names(visit, site):
    """WCAG 2 level AA by axe's rules. One page is tried with its code, and one of those made from docstrings."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python").Axe()
    options = {"runOnly": ["wcag2a", "wcag2aa"], "resultTypes": ["violations"]}
    found = []
    for address in _pages(site):
        if address.startswith("reference/api_"):
            continue
        code = [] if address.startswith("04") else [[".highlight"]]
        page = visit(address)
        for scheme in ("light", "dark"):
            _follow_system(page, scheme)
            context = {"include": [["article"]], "exclude": code}
            for violation in axe.run(page, context=context, options=options).response["violations"]:
                for node in violation["nodes"][:3]:
                    found.append(f"{address}, {scheme}: {violation['help']}: {node['html'][:150]}")
    assert found == []


def test_a_folder_of_files_is_the_whole_site(browser, site):
    """Opened without a server: links, players and the search work, and nothing is asked of the network."""
    page = browser.new_page()
    asked = []
    page.on("request", lambda r: asked.append(r.url) if not r.url.startswith(("file:", "data:", "about:")) else None)
    page.goto((site / "index.html").as_uri())
    page.locator("article a[href*='04_radix_reuse']").first.click()
    page.wait_for_url("**/04_radix_reuse/index.html*")
    assert page.locator("figure.player svg[role=img]").first.is_visible()
    _search(page, "RoPE")
    page.close()
    assert asked == []


def test_figures_follow_the_theme(visit):
    page = visit("")
    for scheme, other in (("light", "dark"), ("dark", "light")):
        _follow_system(page, scheme)
        assert page.locator(f'article img[src*="-{scheme}.svg"]').first.is_visible()
        assert not page.locator(f'article img[src*="-{other}.svg"]').first.is_visible()


def _search(page, words: str) -> None:
    page.get_by_placeholder("Search").first.click()
    page.keyboard.type(words)
    page.locator(".md-search-result__item").first.wait_for(state="visible")
    assert words in page.locator(".md-search-result__list").inner_text()


def test_search_finds_rope(visit):
    _search(visit(""), "RoPE")
