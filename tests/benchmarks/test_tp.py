"""The measurement of tensor parallel, rehearsed by two processes on CPUs."""

from __future__ import annotations

import json

import pytest

from benchmarks import tp

QUICK = ["--device", "cpu", "--batch", "1", "3", "--prompt", "6", "--output", "5", "--seed", "0"]


def test_one_rank_has_no_collective_and_comes_before_those_that_are_compared_with_it():
    found = tp.variants(["a"], [2, 1], ["group", "peer"], ["auto"])
    assert [(variant.tp, variant.collective) for variant in found] == [(1, "none"), (2, "group"), (2, "peer")]


def test_a_row_stands_beside_one_rank_of_its_own_model_graphs_and_batch():
    args = tp.parser().parse_args(QUICK)
    rows = [
        {"model": "llama-2-7b", "tp": ranks, "graphs": graphs, "batch": 1, "tokens_per_s": speed}
        for ranks, graphs, speed in ((1, "off", 100.0), (1, "auto", 500.0), (2, "auto", 750.0), (2, "off", 120.0))
    ]
    one, _, two, _ = tp.beside(rows, args)
    assert (two["speed_up"], two["efficiency"]) == (1.5, 0.75)
    assert 0 < two["predicted_ms"] < one["predicted_ms"]


def test_two_ranks_answer_as_one_and_every_batch_is_timed(tiny_folder):
    args = tp.parser().parse_args([*QUICK, "--models", str(tiny_folder)])
    one, two = tp.variants(args.models, [1, 2], ["group"], ["off"])

    assert tp.greedy_tokens(two, "cpu") == tp.greedy_tokens(one, "cpu")
    rows = tp.speed(two, args)
    assert [row["batch"] for row in rows] == [1, 3]
    assert all(row["step_ms"] > 0 and row["all_reduce_share"] is None for row in rows)


def test_wrong_tokens_stop_it(tiny_folder, monkeypatch):
    answers = iter(([[1]], [[2]]))
    monkeypatch.setattr(tp.fresh, "run", lambda *_, **__: next(answers))
    args = tp.parser().parse_args(["--models", str(tiny_folder), "--tp", "1", "2", "--graphs", "off", "--no-tests"])
    with pytest.raises(SystemExit, match="tp 2, group, graphs off: other greedy tokens in fp32 than tiny"):
        tp.check(args)


@pytest.mark.parametrize(("name", "parameters"), [("qwen3-32b", 32_762_123_264)])
def test_the_large_shape_is_that_of_its_model(name, parameters):
    from benchmarks.ch01_length import parameters as count
    from minisgl.models.config import ModelConfig

    assert json.loads((tp.SHAPES / name / "config.json").read_text())["num_hidden_layers"] == 64
    assert count(ModelConfig.from_folder(tp.SHAPES / name))["total"] == pytest.approx(parameters, rel=1e-3)
