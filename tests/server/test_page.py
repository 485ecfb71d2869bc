"""The page at `/` as a visitor meets it: in Chromium, with real servers."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlparse

import pytest

from minisgl.config import EngineConfig
from minisgl.core import SamplingParams
from minisgl.llm import LLM
from tests.server.conftest import FLAGS, Served, launched, wait_until, write_tiny_model

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("page")]

PAGE = Path(__file__).parents[2] / "minisgl" / "server" / "page"
CONTEXT = 4096
KEY = "open sesame"

# What ends right of the window, or of the box around it that does not scroll.
CUT = """() => [...document.querySelectorAll("body *")].filter(e => {
  const box = e.getBoundingClientRect();
  return box.width && box.right > innerWidth + 1 && !e.closest(".unseen");
}).map(e => e.outerHTML.slice(0, 120)).slice(0, 5)"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One whose answers take long, so that they can be stopped."""
    folder = write_tiny_model(tmp_path_factory.mktemp("long"), vocab_size=260, max_position_embeddings=CONTEXT)
    with launched(folder, *FLAGS) as served:
        yield served


@contextmanager
def visit(browser, url: str, expected: str = "^$", **options):
    """A page, in which nothing may go wrong but what a console message of this pattern tells of."""
    page = browser.new_page(**({"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"} | options))
    page.set_default_timeout(300_000)  # ms; on a busy machine a page takes its time, which is not what is tested
    problems: list[str] = []
    page.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    page.on("request", lambda r: None if r.url.startswith(url) else problems.append(f"leaves the server: {r.url}"))
    page.goto(url)
    yield page
    page.close()
    assert [problem for problem in problems if not re.search(expected, problem)] == []


@pytest.fixture
def page(browser, server):
    with visit(browser, server.url) as page:
        wait_for_state(page, "live")
        yield page


def wait_for_state(page, state: str) -> None:
    page.locator(f'#state[data-state="{state}"]').wait_for()


def ask(page, text: str) -> None:
    """Type a message and send it."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answer(page):
    """The last answer, once it is complete."""
    last = page.locator(".turn.assistant").last
    page.get_by_role("button", name="Send").wait_for()
    return last


def begun(page) -> None:
    """Wait until an answer is on its way."""
    see(page.locator(".turn.assistant .text").last).to_have_text(re.compile(r".{6}", re.DOTALL))


def see(locator):
    """Assertions that wait until they hold; the page's policy lets no other way evaluate anything again and again."""
    from playwright.sync_api import expect

    expect.set_options(timeout=300_000)
    return expect(locator)


def stats(server: Served) -> dict:
    return server.ask("/stats").json()


def wait_until_idle(server: Served) -> None:
    wait_until(lambda: not stats(server)["running"])


def choose(page, **fields: object) -> None:
    """Set some of the settings."""
    page.locator("#details").evaluate("details => details.open = true")
    for name, value in fields.items():
        page.get_by_label(name.replace("_", " ")).fill(str(value))


def sent(page) -> list[dict]:
    """Bodies of the requests for answers, from now on."""
    bodies: list[dict] = []
    page.on("request", lambda r: bodies.append(r.post_data_json) if "/completions" in r.url else None)
    return bodies


# The files


def test_the_page_is_small():
    assert sum(file.stat().st_size for file in PAGE.iterdir()) < 60_000


def test_its_colours_are_those_of_the_courses_drawings():
    pytest.importorskip("matplotlib", reason="the drawings need the extra `dev`")
    from chapters.figures import DARK, LIGHT, NEW, REQUESTS
    from chapters.figures import PAGE as CACHED

    listed = re.search(r"REQUESTS = (\[.*?\])", (PAGE / "run.js").read_text())
    light, dark = (PAGE / "style.css").read_text().split("@media (prefers-color-scheme: dark)", 1)

    assert listed
    assert tuple(json.loads(listed[1])) == REQUESTS
    for theme, css in ((LIGHT, light), (DARK, dark)):
        for name in ("ink", "muted", "faint", "paper"):
            assert f"--{name}: {getattr(theme, name)};" in css
    assert f"--new: {NEW};" in light
    assert f"--page: {CACHED};" in light


def test_only_its_own_scripts_and_styles_may_run(server):
    got = server.ask("/")
    policy, html = got.headers["content-security-policy"], got.text

    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in html.replace("http-equiv", "")
    assert not re.search(r"<script(?![^>]* src=)|<style| style=| on[a-z]+=", html)


def test_it_fits_at_1280_and_390_pixels_in_light_and_dark(page):
    ask(page, "word " * 30 + "w" * 200)
    answer(page)
    choose(page)
    wrong = []
    for width in (1280, 390):
        for scheme, paper in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(30, 33, 41)")):
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == paper
            if (wide := page.evaluate("document.documentElement.scrollWidth")) > width:
                wrong.append(f"{width} px, {scheme}: the document is {wide} px wide")
            wrong += [f"{width} px, {scheme}: {cut}" for cut in page.evaluate(CUT)]
    assert wrong == []


# Chat


def test_an_answer_is_streamed_and_the_next_message_goes_on_from_it(page, server):
    bodies = sent(page)
    choose(page, Temperature=0, Max_tokens=24, System_message="Be brief.")

    ask(page, "Hello 🌧")
    first = answer(page).locator(".text").text_content()
    ask(page, "And then?")
    second = answer(page).locator(".text").text_content()

    assert [m["role"] for m in bodies[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert [m["content"] for m in bodies[1]["messages"]] == ["Be brief.", "Hello 🌧", first, "And then?"]
    assert bodies[1]["stream"] is True
    for body, text in zip(bodies, (first, second), strict=True):
        whole = {k: v for k, v in body.items() if k != "stream_options"} | {"stream": False}
        reply = server.ask("/v1/chat/completions", whole).json()
        assert reply["choices"][0]["message"]["content"] == text
    assert re.search(r"24 tokens .* of \d+ prompt tokens cached .* cut off", answer(page).locator(".meta").inner_text())


def test_settings_go_into_the_request_and_empty_ones_are_left_to_the_server(page):
    bodies = sent(page)
    choose(page, Temperature=0.25, Max_tokens=3)
    page.get_by_label("Top-p").fill("")
    ask(page, "Hello")
    answer(page)

    assert (bodies[0]["temperature"], bodies[0]["max_tokens"]) == (0.25, 3)
    assert "top_p" not in bodies[0]


def test_a_setting_out_of_range_is_not_sent(page):
    bodies = sent(page)
    choose(page, Temperature=7)
    ask(page, "Hello")

    assert page.locator("#temperature:invalid").count() == 1
    assert bodies == []


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stop_ends_the_answer_in_the_engine(page, server, how):
    before = stats(server)["generation_tokens"]
    choose(page, Temperature=0, Max_tokens=CONTEXT - 100)
    ask(page, "Hello")
    begun(page)
    if how == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")

    assert "stopped" in answer(page).locator(".meta").inner_text()
    wait_until_idle(server)
    assert stats(server)["generation_tokens"] - before < CONTEXT - 100


def test_new_chat_forgets_what_was_said_even_while_it_is_being_said(page):
    bodies = sent(page)
    choose(page, Temperature=0, Max_tokens=CONTEXT - 100)
    ask(page, "Hello")
    begun(page)
    page.get_by_role("button", name="New chat").click()
    page.get_by_role("button", name="Send").wait_for()
    choose(page, Max_tokens=4)
    ask(page, "Again")
    answer(page)

    assert page.locator(".turn").count() == 2
    assert [m["content"] for m in bodies[1]["messages"]] == ["Again"]


def test_markup_in_an_answer_stays_text(page):
    frames = [{"choices": [{"index": 0, "delta": {"content": "<img src=x onerror=alert(1)>\n**b**"}}]}]
    body = "".join(f"data: {json.dumps(frame)}\n\n" for frame in frames) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    ask(page, "Hello")

    assert answer(page).locator(".text").text_content() == "<img src=x onerror=alert(1)>\n**b**"
    assert page.locator("#log img").count() == 0


def test_what_the_server_refuses_is_shown_in_its_words_and_can_be_sent_again(browser, server):
    with visit(browser, server.url, expected="status of 400") as page:
        ask(page, "x" * CONTEXT)
        error = answer(page).get_by_role("alert").inner_text()

        assert error.startswith("400: ")
        assert f"{CONTEXT:,}" in error
        assert page.get_by_label("Message", exact=True).input_value() == "x" * CONTEXT


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ('data: {"error": {"message": "the engine is gone: killed"}}\n\n', "the engine is gone: killed"),
        ("", "the connection broke off before the answer was complete"),
    ],
)
def test_an_answer_that_breaks_off_says_so_and_stays(page, end, message):
    begin = 'data: {"choices": [{"index": 0, "delta": {"content": "Once"}}]}\n\n'
    page.route("**/v1/chat/completions", lambda r: r.fulfill(body=begin + end, content_type="text/event-stream"))
    ask(page, "Hello")

    assert answer(page).get_by_role("alert").inner_text() == message
    assert answer(page).locator(".text").text_content() == "Once"


# The engine


def test_the_view_agrees_with_the_servers_own_numbers(page, server):
    choose(page, Max_tokens=40)
    ask(page, "What is shown beside?")
    answer(page)
    wait_until_idle(server)
    now = stats(server)
    cached, free, pages = now["pages_cached"], now["pages_available"] - now["pages_cached"], now["pages"]
    expected = f"Page pool: of {pages} pages 0 held by requests, {cached} only in the prefix tree, {free} free"

    assert cached > 0
    see(page.locator("#pool")).to_have_attribute("aria-label", expected)
    see(page.locator("#tree-says")).to_contain_text(f", {cached} pages")
    see(page.locator("#n-pages")).to_have_text(f"0 of {pages}")
    assert page.get_by_label(re.compile("Batch timeline, up to step")).is_visible()


def test_the_tree_shows_words(page):
    choose(page, System_message="Be brief.", Max_tokens=4)
    ask(page, "Hello")
    answer(page)

    page.locator("#tree text", has_text="<s><|syst").wait_for()


def test_pause_closes_the_trace_and_going_on_opens_it_again(page):
    with page.expect_event("requestfailed", lambda request: request.url.endswith("/trace")):
        page.get_by_role("button", name="Pause").click()
    assert page.locator("#state").inner_text() == "paused"
    with page.expect_request("**/trace"):
        page.get_by_role("button", name="Go on").click()
    wait_for_state(page, "live")


def test_all_of_it_is_reached_and_read_by_keyboard(page):
    page.locator("#details").evaluate("details => details.open = true")
    page.locator("#pause").focus()
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    page.locator("#pool").focus()
    page.keyboard.press("ArrowRight")

    settings = ["SUMMARY", "temperature", "top_p", "max_tokens", "system", "key"]
    assert reached == ["clear", "log", "input", "send", *settings, "timeline", "pool"]
    assert page.locator("#pool-says").inner_text().startswith("page 1: ")


def test_every_control_and_picture_has_a_name(page):
    page.locator("#details").evaluate("details => details.open = true")
    named = {
        "button": ["Pause", "New chat", "Send"],
        "textbox": ["Message", "System message"],
        "spinbutton": ["Temperature", "Top-p", "Max tokens"],
        "img": [re.compile("Batch timeline"), re.compile("Page pool"), re.compile("Prefix tree")],
    }
    for role, names in named.items():
        for name in names:
            see(page.get_by_role(role, name=name, exact=True)).to_have_count(1)
    assert page.get_by_label(re.compile("API key")).count() == 1


@pytest.mark.slow
def test_a_base_model_continues_text_and_the_key_stays_in_the_tab(browser, tmp_path):
    (write_tiny_model(tmp_path) / "chat_template.jinja").unlink()
    with (
        launched(tmp_path, *FLAGS, "--api-key", KEY, ready=False) as server,
        visit(browser, server.url, expected="status of (400|401|503)") as page,
    ):
        page.locator("#key:focus").wait_for()
        assert "API key" in page.locator("#state").inner_text()
        page.keyboard.type(KEY)
        page.keyboard.press("Enter")
        wait_for_state(page, "live")
        bodies = sent(page)
        choose(page, Max_tokens=8, Temperature=0)
        ask(page, "Once upon")
        first = answer(page).locator(".text").text_content()
        ask(page, " a time")
        answer(page)

        assert "no chat template" in page.locator("#notice").inner_text()
        assert [body.get("prompt") for body in bodies] == [None, "Once upon", f"Once upon{first} a time"]
        assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]


@pytest.mark.slow
def test_it_says_that_the_server_is_gone_and_comes_back_with_it(browser, tiny_folder):
    with (
        launched(tiny_folder, *FLAGS) as first,
        visit(browser, first.url, expected="ERR_|status of 503") as page,
    ):
        wait_for_state(page, "live")
        first.process.kill()
        wait_for_state(page, "gone")
        assert "trying again in" in page.locator("#state").inner_text()
        ask(page, "Hello?")
        assert answer(page).get_by_role("alert").inner_text() == "the server cannot be reached"

        with launched(tiny_folder, *FLAGS, "--port", str(urlparse(first.url).port)):
            wait_for_state(page, "live")
            ask(page, "Hello!")
            assert answer(page).locator(".text").text_content()


# Its parts


def test_events_are_read_however_the_bytes_are_cut(page):
    stream = ': hello\r\n\r\ndata: {"a": "é🌧"}\n\ndata:one\r\ndata: two\r\n\r\nevent: x\n\ndata: [DONE]\n\nunfinished'
    read = """async ([stream, size]) => {
      const { events } = await import("./page/api.js");
      const bytes = new TextEncoder().encode(stream);
      const pieces = new ReadableStream({ start(controller) {
        for (let i = 0; i < bytes.length; i += size) controller.enqueue(bytes.slice(i, i + size));
        controller.close();
      } });
      const all = [];
      for await (const data of events(new Response(pieces))) all.push(data);
      return all;
    }"""
    for size in range(1, 40):
        assert page.evaluate(read, [stream, size]) == ['{"a": "é🌧"}', "one\ntwo", "[DONE]"]


def test_a_trace_is_understood_as_the_courses_drawings_understand_it(page, tiny_folder, tmp_path):
    pytest.importorskip("matplotlib", reason="the drawings need the extra `dev`")
    from chapters.draw import read_trace

    path = tmp_path / "trace"
    switches = {"kv_pages": 24, "page_size": 4, "max_batch_tokens": 16, "output_reserve": 0.0}
    with LLM(EngineConfig(model=str(tiny_folder), device="cpu", trace=str(path), **switches)) as llm:
        prompts = [[5] * 20, [5] * 18 + [6, 7], [9] * 7, [5] * 20 + [8] * 9]
        llm.generate(prompts, SamplingParams(max_tokens=16, ignore_eos=True))
    read = """async (lines) => {
      const { Run } = await import("./page/run.js");
      const [header, ...events] = lines.map((line) => JSON.parse(line));
      const run = new Run(header);
      return events.map((event) => {
        const before = run.steps.length;
        run.take(event);
        const step = run.steps.length > before ? run.steps.at(-1) : { cells: new Map(), finished: new Map() };
        return {
          cells: [...step.cells].map(([id, c]) => [id, c.kind, c.start ?? 0, c.n ?? 0]).sort((a, b) => a[0] - b[0]),
          finished: [...step.finished],
          tables: [...run.tables].sort((a, b) => a[0] - b[0]),
          free: run.free,
          tree: run.tree.map((node) => node[3]),
        };
      });
    }"""
    seen = page.evaluate(read, path.read_text().splitlines())
    trace = read_trace(path)

    kinds = {kind for step in trace.steps for kind in step.kinds.values()}
    assert kinds >= {"prefill", "decode", "waiting"}
    for step, shown in zip(trace.steps, seen, strict=True):
        rows = {i: (step.batch[i].start, step.batch[i].tokens) if i in step.batch else (0, 0) for i in step.kinds}
        assert shown["cells"] == [[i, step.kinds[i], *rows[i]] for i in sorted(step.kinds)]
        assert dict(shown["finished"]) == step.finished
        assert dict(shown["tables"]) == step.tables
        assert shown["free"] == step.free
        assert shown["tree"] == [node.pages for node in step.tree]


def test_steps_that_were_left_out_make_no_prefill_of_a_decode(page):
    read = """async () => {
      const { Run } = await import("./page/run.js");
      const run = new Run({ pages: 9, page_size: 4 });
      const event = { waiting: [], preempted: [], finished: [], free: 5 };
      run.take({ ...event, step: 0, batch: [], tables: { 3: [1] } });
      run.take({ ...event, step: 1, batch: [[3, 2, 1], [4, 4, 1]], tables: { 4: [1, 2] } });
      run.take({ ...event, step: 6, batch: [[3, 7, 1], [5, 8, 1]], tables: { 5: [4, 5, 6] } });
      return run.steps.map((step) => [...step.cells].map(([id, cell]) => [id, cell.kind, cell.cached]));
    }"""
    first, second = page.evaluate(read)

    assert first == [[3, "decode", 0], [4, "prefill", 4]]  # 4 found all but its last token in the cache
    assert second == [[3, "decode", 0], [5, "decode", 0], [4, "paused", None]]


def test_a_pool_too_large_for_squares_is_drawn_in_bands(page):
    draw = """async (pages) => {
      const [{ Run }, { pool }] = [await import("./page/run.js"), await import("./page/draw.js")];
      const run = new Run({ pages, page_size: 16 });
      run.tables.set(1, Array.from({ length: pages / 2 }, (_, i) => i + 1));
      const canvas = document.querySelector("#pool").cloneNode();
      document.querySelector("#engine").append(canvas);
      const { each, rows, columns } = pool(canvas, run);
      const { data } = canvas.getContext("2d").getImageData(2, 0, 1, canvas.height);
      const at = (share) => [...data.slice(4 * Math.floor(share * canvas.height)).slice(0, 4)];
      return { each, cells: rows * columns, high: canvas.clientHeight, full: at(0.2), empty: at(0.7) };
    }"""
    small, large = page.evaluate(draw, 384), page.evaluate(draw, 130_000)

    assert small["each"] == 1
    assert large["each"] * large["cells"] >= 130_000
    assert max(small["high"], large["high"]) <= 260
    assert large["full"] != large["empty"]
