from __future__ import annotations

import pytest

pytest.importorskip("matplotlib", reason="figures need the extra `site`")

from chapters import figures

SVG = '<path d="M 1.25 3.5" clip-path="url(#p0123456789)"/>\n'


def test_a_last_digit_and_a_hashed_id_do_not_make_a_figure_stale():
    assert figures.same(SVG, SVG.replace("1.25", "1.250001").replace("p0123456789", "pabcdef0123"))


@pytest.mark.parametrize("change", [("1.25", "1.35"), ("path d", "line d")])
def test_a_moved_point_or_another_shape_makes_a_figure_stale(change):
    assert not figures.same(SVG, SVG.replace(*change))


def test_text_stays_text_and_the_background_transparent(tmp_path):
    script = tmp_path / "word.py"
    script.write_text(
        "from chapters.figures import diagram, label\n\n"
        "def draw(theme):\n"
        "    figure, axes = diagram(2, 1)\n"
        "    label(axes, theme, 1, 0.5, 'page')\n"
        "    return figure\n"
    )
    light, dark = (figures.render(script, theme) for theme in (figures.LIGHT, figures.DARK))
    assert ">page</text>" in light
    assert "system-ui" in light
    assert figures.LIGHT.ink in light
    assert figures.DARK.ink in dark
    assert figures.LIGHT.paper not in light
