"""Which figures of two results stand beside each other."""

from __future__ import annotations

import json

import pytest

from benchmarks import compare
from benchmarks.record import RESULTS


def result(**data):
    return {"name": "some", "device": "a CPU", "data": data}


def test_a_ratio_is_new_by_old():
    [row] = compare.rows(result(tokens_per_s=200.0), result(tokens_per_s=300.0))
    assert row == {"figure": "tokens per s", "old": 200.0, "new": 300.0, "new/old": 1.5}


def test_figures_are_found_wherever_they_stand_and_named_by_their_place():
    old, new = ({"batches": {"16": {"first_token_ms": {"p99": ms}}}} for ms in (4.0, 3.0))
    [row] = compare.rows(result(**old), result(**new))
    assert (row["figure"], row["new/old"]) == ("batches 16 first token ms p99", 0.75)


def test_single_passes_settings_and_what_one_side_lacks_are_left_out():
    old = result(seconds=1.0, tokens_per_s=1.0, passes=[{"seconds": 1.0}], machine={"seconds": 1.0}, scale=1.0)
    assert [row["figure"] for row in compare.rows(old, result(seconds=1.0, machine={"seconds": 2.0}))] == ["seconds"]


def test_nothing_by_nothing_has_no_ratio():
    [row] = compare.rows(result(work={"tokens_reused": 0}), result(work={"tokens_reused": 5}))
    assert row["new/old"] is None


def test_two_results_without_a_common_figure_are_an_error():
    with pytest.raises(ValueError, match="no figure in common"):
        compare.rows(result(seconds=1.0), result(tokens_per_s=1.0))


def test_settings_that_differ_are_told_and_figures_are_not():
    old, new = (
        result(scale=1.0, tokens_per_s=5.0, dtype="float32"),
        result(scale=0.1, tokens_per_s=6.0, dtype="float32"),
    )
    assert compare.differences(old, new) == ["scale: 1.0 → 0.1"]
    assert compare.differences(old, {**new, "device": "a GPU"})[0] == "device: a CPU → a GPU"


@pytest.mark.parametrize("text", ["no JSON", "[]", '{"device": "a CPU"}'])
def test_a_file_that_is_no_result_is_named(tmp_path, text):
    (path := tmp_path / "some.json").write_text(text)
    with pytest.raises(ValueError, match=r"some\.json is no result"):
        compare.read(path)


def test_the_other_engines_are_compared_by_workload():
    peers = compare.read(RESULTS / "peers_h200.json")
    speeds = {name: peer["tokens_per_s"] for name, peer in peers["data"]["peers"].items()}
    rows = compare.rows(peers, result(batches={"1": {"tokens_per_s": 814.0}, "7": {"tokens_per_s": 1.0}}))
    assert {row["figure"]: row["old"] for row in rows} == {f"{n} batch 1": own["batch 1"] for n, own in speeds.items()}
    rows = compare.rows(peers, result(tokens_per_s=2 * speeds["mini-sglang"]["offline"]))
    assert {row["figure"]: row["new/old"] for row in rows}["mini-sglang offline"] == 2


def test_the_other_engines_are_below_the_limit():
    data = json.loads((RESULTS / "peers_h200.json").read_text())["data"]
    for peer in data["peers"].values():
        assert all(speed < data["limit_tokens_per_s"][workload] for workload, speed in peer["tokens_per_s"].items())
