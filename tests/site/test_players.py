"""The players, driven as a reader drives them: by buttons, by the slider, by the keyboard."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="the palette is that of the figures")

from chapters import figures

ROOT = Path(__file__).parents[2]
SCRIPTS = {path.stem: path for path in (ROOT / "chapters/players").glob("*.js") if path.stem != "player"}

# What is drawn: words of a value that was not there, and text that leaves the drawing.
WRONG = """figure => {
  const svg = figure.querySelector(".player-drawing svg"), all = svg.getBoundingClientRect(), wrong = [];
  if (/NaN|undefined|Infinity|null/.test(svg.outerHTML + figure.querySelector(".player-caption").textContent))
    wrong.push("a value is missing");
  for (const text of svg.querySelectorAll("text")) {
    const box = text.getBoundingClientRect();
    const out = [all.left - box.left, box.right - all.right, all.top - box.top, box.bottom - all.bottom];
    if (box.width && Math.max(...out) > 1) wrong.push(`cut off: ${text.textContent}`);
  }
  return wrong;
}"""


def test_the_palette_is_that_of_the_figures():
    style = (ROOT / "chapters/stylesheets/player.css").read_text(encoding="utf-8")
    colors = dict(re.findall(r"--([\w-]+): (#\w{6});", style.split("slate")[0]))
    dark = dict(re.findall(r"--([\w-]+): (#\w{6});", style.split("slate")[1]))

    assert [colors[name] for name in ("q", "k", "v", "new", "weights", "page")] == [
        figures.Q, figures.K, figures.V, figures.NEW, figures.WEIGHTS, figures.PAGE,
    ]  # fmt: skip
    assert tuple(colors[f"request-{i}"] for i in range(len(figures.REQUESTS))) == figures.REQUESTS
    for theme, found in ((figures.LIGHT, colors), (figures.DARK, dark)):
        assert [found[n] for n in ("ink", "muted", "faint", "paper")] == [
            theme.ink, theme.muted, theme.faint, theme.paper,
        ]  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_player_and_its_recording_are_smaller_than_60_kb(name):
    data = json.loads((ROOT / f"benchmarks/results/player_{name}.json").read_text(encoding="utf-8"))["data"]
    recording = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    assert SCRIPTS[name].stat().st_size + len(recording.encode()) < 60_000


@pytest.mark.browser
@pytest.mark.xdist_group("site")
class TestInTheBrowser:
    @pytest.fixture(params=SCRIPTS)
    def player(self, request, visit, site):
        """The player on its page; and no error in the browser's console."""
        [address, *_] = [
            path.relative_to(site).as_posix()
            for path in sorted(site.rglob("*.html"))
            if f'data-player="{request.param}"' in path.read_text(encoding="utf-8")
        ]
        return visit(address).locator(f'figure[data-player="{request.param}"]')

    def test_every_frame_of_every_choice_is_whole_and_says_what_happens(self, player):
        for choice in range(max(1, player.get_by_role("radio").count())):
            if player.get_by_role("radio").count():
                player.get_by_role("radio").nth(choice).check()
            frames = int(player.get_by_role("slider").get_attribute("max")) + 1
            assert frames > 1
            for frame in range(frames):
                player.get_by_role("slider").evaluate(
                    "(slider, frame) => { slider.value = frame; slider.oninput(); }", frame
                )
                assert player.get_attribute("data-frame") == str(frame)
                assert len(player.locator(".player-caption").inner_text()) > 10
                assert player.evaluate(WRONG) == [], f"frame {frame + 1} of choice {choice + 1}"

    def test_it_plays_to_the_end_and_stops_where_it_is_told(self, player):
        player.locator("select").select_option("5×")
        player.get_by_title("Play (space)").click()
        player.page.wait_for_function("figure => figure.dataset.frame >= 3", arg=player.element_handle())
        player.get_by_title("Pause (space)").click()
        stopped = player.get_attribute("data-frame")
        player.page.wait_for_timeout(500)
        assert player.get_attribute("data-frame") == stopped

    def test_the_keyboard_steps_and_plays_and_does_not_turn_the_page(self, player):
        last = player.get_by_role("slider").get_attribute("max")
        player.focus()
        seen = []
        for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "End", "ArrowRight", "Home", "ArrowLeft"):
            player.press(key)
            seen.append(player.get_attribute("data-frame"))
        assert seen == ["1", "2", "1", last, last, "0", "0"]

        player.press("Space")
        assert player.get_by_title("Pause (space)").is_visible()
        player.press("Space")
        assert player.get_by_title("Play (space)").is_visible()
        assert "data-player" in player.page.content()

    def test_without_motion_nothing_glides(self, player):
        shape = player.locator(".player-drawing :is(rect, circle, text)").first
        assert shape.evaluate("e => getComputedStyle(e).transitionDuration") != "0s"
        player.page.emulate_media(reduced_motion="reduce")
        assert shape.evaluate("e => getComputedStyle(e).transitionDuration") == "0s"


def test_every_player_is_on_a_page():
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "chapters").glob("*/*.md"))
    assert set(re.findall(r'{{ player\("(\w+)"', text)) == set(SCRIPTS)
