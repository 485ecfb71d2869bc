"""No page may be published while it waits for a measurement; and the macros by which a page waits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chapters import macros

ROOT = Path(__file__).parents[2]
CIRCUMSTANCES = {
    "device": "a GPU",
    "versions": {"torch": "2.13.0"},
    "commit": "abc",
    "date": "2025-01-02",
    "command": "x",
}


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(macros, "RESULTS", tmp_path)

    def write(name, **data):
        (tmp_path / f"{name}.json").write_text(json.dumps(CIRCUMSTANCES | {"data": data}))

    return write


@pytest.mark.xdist_group("site")
def test_no_page_waits_for_a_measurement(site):
    waiting = [page.name for page in site.rglob("*.html") if "Not measured yet" in page.read_text("utf-8")]
    assert waiting == []


def test_a_result_is_measured_when_its_file_is_there(results):
    assert not macros.measured("speed")
    results("speed", chapters={"7": 1.5})
    assert macros.measured("speed")


def test_a_part_of_a_result_is_measured_when_it_is_in_the_file(results):
    results("speed", chapters={"7": 1.5})
    assert macros.measured("speed", "data.chapters.7")
    assert not macros.measured("speed", "data.chapters.8")


def test_what_is_not_measured_is_named():
    assert "benchmarks/results/speed.json" in macros.unmeasured("speed")


def test_a_ledger_is_a_table_of_changes_with_its_circumstances(results):
    rows = [
        {"change": "graphs", "batch": 256, "predicted_us": 5000, "measured_us": 5210.4, "why": "one launch"},
        {"change": "a lucky guess", "batch": 1, "predicted_us": None, "measured_us": 12, "why": "nobody knows"},
    ]
    results("ledger", rows=rows)

    lines = macros.ledger("ledger").splitlines()
    assert lines[2] == "| graphs | 256 | 5,000 µs | 5,210 µs | one launch |"
    assert lines[3] == "| a lucky guess | 1 | – | 12 µs | nobody knows |"
    assert lines[-1].startswith("<small>Measured on a GPU")


def test_an_empty_ledger_is_not_measured(results):
    results("ledger", rows=[])
    assert macros.ledger("ledger") == macros.unmeasured("ledger")
