"""`minisgl bench serve` against the real server, on a tiny model; no speed is tested here."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from contextlib import nullcontext

import pytest
import torch

from benchmarks import serve
from benchmarks.serving import own
from benchmarks.serving.client import Sample, Server
from benchmarks.serving.load import Pass
from minisgl.cli import main

SMALL = ["--requests", "4", "--scale", "0.02"]
ENGINE = ["--device", "cpu", "--max-running-requests", "4", "--kv-pages", "200"]


@pytest.fixture(scope="module")
def flags(tiny_folder):
    return ["--model", str(tiny_folder), *ENGINE]


@pytest.fixture(scope="module")
def url(flags):
    """A server for all tests that do not need one of their own."""
    with own.running(flags) as url:
        yield url


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Runs the benchmark through the command line; returns the record it wrote."""

    def run(*options):
        monkeypatch.setattr(sys, "argv", ["minisgl"])
        monkeypatch.setattr(sys, "path", list(sys.path))
        path = tmp_path / "result.json"
        main(["bench", "serve", "--json", str(path), *options])
        return json.loads(path.read_text())

    return run


@pytest.fixture
def load(bench, url):
    """The figures of the only load of a run against the server that is there."""

    def run(*options):
        data = bench("--url", url, "--vocabulary", "300", *options)["data"]
        [(name, figures)] = data["loads"].items()
        return data, name, figures

    return run


def test_it_starts_a_server_measures_and_ends_it(bench, flags):
    data = bench(*flags, *SMALL)["data"]
    figures = data["loads"]["all at once"]
    assert (figures["completed"], figures["errors"], figures["finish_reasons"]) == (4, {}, {"length": 4})
    assert figures["output_tokens"] == figures["asked_tokens"]
    assert figures["tokens_per_s"] > 0
    assert data["server"] == "minisgl serve"
    assert data["switches"]["kv_pages"] == 200


def test_a_server_that_does_not_start_says_why(bench, capsys):
    with pytest.raises(SystemExit):
        bench("--model", "/no/such/folder", "--vocabulary", "9")
    assert "/no/such/folder" in capsys.readouterr().err


def test_the_server_is_asked_in_token_ids_and_for_whole_answers(load):
    data, _, figures = load(*SMALL)
    assert data["takes"]["token_ids"]
    assert data["takes"]["ignore_eos"]
    assert figures["prompt_tokens"] == sum(passed["prompt_tokens"] for passed in figures["passes"]) > 4


def test_the_parts_of_an_answers_time_are_in_order(load):
    _, _, figures = load(*SMALL)
    first, whole = figures["first_token_ms"], figures["end_to_end_ms"]
    assert 0 < first["p50"] < whole["p50"] <= whole["p90"] <= whole["p99"]
    assert figures["per_token_ms"]["mean"] > 0
    assert figures["between_tokens_ms"]["mean"] <= figures["between_pieces_ms"]["mean"]


@pytest.mark.parametrize("kind", [[], ["--chat"], ["--no-stream"], ["--chat", "--no-stream"]])
def test_every_way_of_asking_gives_all_tokens(load, kind):
    _, _, figures = load(*kind, "--workload", "random", "--input", "3", "9", "--output", "2", "5", "--requests", "3")
    assert (figures["completed"], figures["output_tokens"]) == (3, figures["asked_tokens"])
    assert (figures["first_token_ms"] is None) == ("--no-stream" in kind)


def test_a_group_finds_its_beginning_in_the_cache(load):
    shape = ["--groups", "1", "--shared", "64", "--input", "4", "4", "--output", "2", "2"]
    _, _, figures = load("--workload", "shared-prefix", *shape, "--requests", "3", "--concurrency", "1")
    assert figures["cached_tokens"] == 2 * 64


@pytest.mark.parametrize("kind", [[], ["--chat"]])
def test_a_next_turn_finds_the_turns_before_it_in_the_cache(load, kind):
    shape = ["--input", "8", "8", "--output", "4", "4", "--turns", "3", "3"]
    _, _, figures = load("--workload", "multi-turn", *shape, "--requests", "2", "--concurrency", "1", *kind)
    assert (figures["requests"], figures["completed"]) == (6, 6)
    assert figures["cached_tokens"] > 0


def test_several_loads_make_a_curve_and_a_picture(bench, url, tmp_path):
    pytest.importorskip("matplotlib", reason="a plot needs it")
    picture = tmp_path / "some/curve.png"
    shape = ["--workload", "random", "--input", "3", "9", "--output", "2", "5", "--requests", "3", "--passes", "2"]
    more = ["--slo", "ttft=100s,tpot=100s", "--plot", str(picture)]
    data = bench("--url", url, "--vocabulary", "300", *shape, "--rate", "20", "50", *more)["data"]
    assert list(data["loads"]) == ["rate 20", "rate 50"]
    for figures in data["loads"].values():
        assert [done["completed"] for done in figures["passes"]] == [3, 3]
        assert figures["goodput_per_s"] == figures["requests_per_s"]
        assert figures["cached_tokens"] == 0  # no pass asks what another asked
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_the_server_refuses_is_counted(load):
    shape = ["--input", "1500", "2500", "--output", "1", "1", "--requests", "6"]  # the context is 2,048
    _, _, figures = load("--workload", "random", *shape)
    long = sum(done["errors"]["HTTP 400"] for done in figures["passes"])
    assert (0 < long < 6, figures["completed"], figures["errors"]) == (True, 6 - long, {"HTTP 400": long})
    assert "2,048" in figures["first_error"]


@pytest.mark.slow
def test_the_server_beside_llm_generate(bench, flags, capsys):
    data = bench(*flags, *SMALL, "--warmup", "short", "--compare-llm")["data"]
    [served], [direct] = data["loads"]["all at once"]["passes"], data["llm"]["passes"]
    assert served["output_tokens"] == direct["output_tokens"] == served["asked_tokens"]
    assert data["llm"]["ratio"] == pytest.approx(served["tokens_per_s"] / direct["tokens_per_s"])
    assert "tokens/s through the server against LLM.generate: " in capsys.readouterr().out


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_server_and_llm_take_turns_in_going_first(monkeypatch, device):
    """Whoever is second finds a warmer machine."""
    order = []
    monkeypatch.setattr(serve, "choose_device", lambda name: torch.device(device))
    monkeypatch.setattr(serve, "engine_config", lambda args: None)
    monkeypatch.setattr(serve, "LLM", lambda config: nullcontext("llm"))
    monkeypatch.setattr(serve, "server", lambda args: nullcontext("url"))
    monkeypatch.setattr(serve, "measure", lambda url, args, passes: ("server", passes[0]))

    def loop(asked):
        order.append(asked)
        return Server("url"), {"all at once": [Pass([Sample(10, 0.0, ended=2.0, output_tokens=10)])]}

    def generate(seed):
        order.append(("llm", seed - 7))
        return {"seconds": 1.0, "tokens_per_s": 4.0 * (1 + seed - 7)}

    monkeypatch.setattr(serve, "loop", loop)
    monkeypatch.setattr(serve, "llm_pass", lambda args, llm, seed: generate(seed))
    monkeypatch.setattr(serve.fresh, "run", lambda module, option, seed, what: generate(int(seed)))
    found = serve.beside_llm(Namespace(passes=3, seed=7, detokenize=True, device=None))[2]
    assert order == [("server", 0), ("llm", 0), ("llm", 1), ("server", 1), ("server", 2), ("llm", 2)]
    assert found["ratios"] == pytest.approx([5 / 4, 5 / 8, 5 / 12])
    assert found["ratio"] == pytest.approx(5 / 8)


def test_a_key_does_not_reach_the_result(bench, url):
    record = bench("--url", url, "--vocabulary", "300", *SMALL, "--api-key", "top-secret")
    assert "--api-key …" in record["command"]
    assert "top-secret" not in json.dumps(record)


def test_no_server_is_one_line(bench, capsys):
    with pytest.raises(SystemExit) as end:
        bench("--url", f"http://127.0.0.1:{own.free_port()}")
    assert end.value.code == 1
    assert "no server answers at http://127.0.0.1" in capsys.readouterr().err
