from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chapters import macros
from chapters.manifest import CourseError
from chapters.symbols import UnknownSymbol, find

ROOT = Path(__file__).parents[2]


@pytest.fixture
def results(tmp_path, monkeypatch):
    record = {
        "device": "a CPU, 2 threads",
        "versions": {"python": "3.11.2", "torch": "2.13.0"},
        "commit": "abc1234",
        "date": "2025-01-02",
        "command": "python -m benchmarks.speed",
        "data": {"lengths": [16, 32], "ms": {"16": 1.25}},
    }
    (tmp_path / "speed.json").write_text(json.dumps(record))
    monkeypatch.setattr(macros, "RESULTS", tmp_path)


def test_code_shows_a_function_with_its_decorators_and_its_place():
    lines = macros.code("minisgl.simple:cached_generate").splitlines()
    assert lines[0].startswith('````python title="minisgl/simple.py:')
    assert lines[1] == "@torch.inference_mode()"
    assert lines[2] == "def cached_generate("
    assert lines[-1] == "````"


def test_code_shows_a_method_without_its_class_indentation():
    assert "\ndef append(self" in macros.code("minisgl.kvcache.contiguous:ContiguousCache.append")


def test_the_place_of_a_symbol_is_the_line_where_it_begins():
    symbol = find(ROOT, "minisgl.simple:cached_generate")
    line = int(macros.code("minisgl.simple:cached_generate").split('"')[1].rpartition(":")[2])
    assert (ROOT / symbol.path).read_text(encoding="utf-8").splitlines()[line - 1] == "@torch.inference_mode()"


def test_symbols_of_the_kernels_are_found_in_their_folder():
    assert find(ROOT, "minisgl_kernels.reference:rms_norm").path.as_posix() == "kernels/minisgl_kernels/reference.py"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("minisgl.nowhere:step", "no module 'minisgl.nowhere'"),
        ("minisgl.simple:stepp", "defines no 'stepp'"),
        ("minisgl.kvcache.contiguous:ContiguousCache.drop", "defines no 'ContiguousCache.drop'"),
        ("minisgl.simple", "write package.module:function"),
    ],
)
def test_an_unknown_symbol_is_an_error_that_names_it(name, message):
    with pytest.raises(UnknownSymbol, match=message):
        macros.code(name)


def test_an_example_is_a_whole_file_titled_with_its_place():
    text = macros.example("add_policy.py")
    assert text.startswith('````python title="chapters/reference/examples/add_policy.py"\n"""Policies of your own')
    assert "def register() -> None:" in text
    assert text.endswith('computed")\n````')


def test_an_unknown_example_is_an_error_that_names_the_folder():
    with pytest.raises(LookupError, match=r"no example 'add_polici\.py' in chapters/reference/examples"):
        macros.example("add_polici.py")


def test_a_task_shows_signature_and_docstring_but_no_body():
    box = macros.task("02.1")
    assert "def append(self" in box
    assert "Raises:" in box
    assert "self.kv[layer, 0, start:end]" not in box
    assert "pytest tests/ch02_kv_cache/" in box
    assert box.count('??? tip "Hint') == 2


def test_a_solution_holds_the_body_folded():
    box = macros.solution("02.1")
    assert box.startswith("??? success")
    assert "    self.kv[layer, 0, start:end] = k" in box


def test_an_unknown_task_is_an_error():
    with pytest.raises(CourseError, match=r"no task 99\.1"):
        macros.task("99.1")


@pytest.mark.usefixtures("results")
class TestResults:
    def test_a_result_is_found_by_keys_and_list_indexes_and_formatted(self):
        assert macros.result("speed", "data.lengths.1") == "32"
        assert macros.result("speed", "data.ms.16", ".1f") == "1.2"

    def test_a_missing_file_is_an_error_that_names_it(self):
        with pytest.raises(LookupError, match=r"benchmarks/results/spead\.json"):
            macros.result("spead", "data")

    def test_a_missing_path_is_an_error_that_says_what_there_is(self):
        with pytest.raises(LookupError, match=r"'ms'"):
            macros.result("speed", "data.seconds")
        with pytest.raises(LookupError, match=r"at '2'"):
            macros.result("speed", "data.lengths.2")

    def test_circumstances_name_device_versions_date_commit_and_command(self):
        line = macros.circumstances("speed")
        for part in ("a CPU, 2 threads", "torch 2.13.0", "2025-01-02", "abc1234", "python -m benchmarks.speed"):
            assert part in line


def test_a_figure_needs_both_variants_and_tells_its_size(tmp_path):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "mask-light.svg").write_text('<svg width="9pt" viewBox="0 0 504 216.5">')
    with pytest.raises(LookupError, match="no figure 'mask'"):
        macros.figure(tmp_path, "mask", "the causal mask")

    (tmp_path / "figures" / "mask-dark.svg").write_text('<svg width="9pt" viewBox="0 0 504 216.5">')
    assert macros.figure(tmp_path, "mask", "the causal mask").count("width=504 height=216.5") == 2


def test_a_player_stands_in_the_page_with_its_frames_and_scripts(results, monkeypatch, tmp_path):
    (tmp_path / "chapters" / "players").mkdir(parents=True)
    (tmp_path / "chapters" / "players" / "speed.js").touch()
    (tmp_path / "speed.json").rename(tmp_path / "player_speed.json")
    monkeypatch.setattr(macros, "ROOT", tmp_path)

    markup = macros.player("04_radix_reuse/index.html", "speed", 'A "drawing".')
    assert '"ms":{"16":1.25}' in markup
    assert 'aria-label="A &quot;drawing&quot;."' in markup
    assert '<script src="../players/player.js"></script>\n<script src="../players/speed.js"></script>' in markup


def test_an_unknown_player_is_an_error():
    with pytest.raises(LookupError, match=r"no player chapters/players/spead\.js"):
        macros.player("index.html", "spead", "")


def test_the_map_shows_written_chapters_then_planned_ones():
    lines = dict.fromkeys(range(1, 99), "a part")

    *rows, _, planned = macros.course_map(lines).splitlines()[2:]

    assert rows[1].startswith("| 2 | [**KV cache**](02_kv_cache/index.md) | a part | 4 | ")
    numbers = [int(row.split("|")[1]) for row in rows]
    numbers += [int(part.split()[0]) for part in planned.removeprefix("Planned: ").split("; ")]
    assert numbers == list(range(1, len(numbers) + 1))


def test_a_chapter_without_a_line_on_the_map_is_an_error():
    with pytest.raises(LookupError, match="no line for chapter 1"):
        macros.course_map({})


@pytest.mark.model
def test_the_config_behind_the_roofline_page_is_the_models_own():
    import minisgl_hub as hub

    from minisgl.models.config import ModelConfig

    stored = json.loads((ROOT / "chapters/reference/smollm2.json").read_text())
    assert ModelConfig.from_hf(stored) == ModelConfig.from_folder(hub.resolve("smollm2"))


def test_a_macro_error_fails_the_strict_build_and_is_told(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text('# Home\n\n{{ code("minisgl.simple:stepp") }}\n')
    (tmp_path / "mkdocs.yml").write_text(
        "site_name: broken\n"
        "plugins:\n"
        f"  - macros: {{module_name: '{ROOT / 'chapters' / 'macros'}', on_undefined: strict}}\n"
    )
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode != 0
    assert "minisgl/simple.py defines no 'stepp'" in done.stderr + done.stdout
