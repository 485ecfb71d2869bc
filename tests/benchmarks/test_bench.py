"""`minisgl bench` from the command line to its result, on a tiny model; no speed is tested here."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import ladder, ladder_offline, latency, measure, offline, prefix
from minisgl.cli import main
from minisgl.config import EngineConfig
from minisgl.llm import LLM

SMALL = {
    "offline": ["--requests", "3", "--scale", "0.02"],
    "latency": ["--batch", "1", "3", "--scale", "0.01"],
    "prefix": ["--requests", "3", "--scale", "0.05"],
}


@pytest.fixture(scope="module")
def bench(tiny_folder, tmp_path_factory):
    """Runs one benchmark through the command line; returns the record it wrote, and what was printed."""
    folder = tmp_path_factory.mktemp("results")

    def run(what, *options):
        path = folder / f"{what}.json"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["minisgl"])
            patch.setattr(sys, "path", list(sys.path))
            patch.setattr(offline, "speeds", lambda *_: {"copy_bytes_per_s": 1e10, "matmul_flops_per_s": 1e11})
            patch.setattr("benchmarks.ch01_length.machine", lambda *_, **__: offline.speeds())
            main(["bench", what, "--model", str(tiny_folder), "--device", "cpu", "--json", str(path), *options])
        return path

    return run


@pytest.fixture(scope="module")
def results(bench):
    """The record that each benchmark wrote."""
    return {what: json.loads(bench(what, *options).read_text()) for what, options in SMALL.items()}


def figures(data):
    """The parts of a result that hold figures."""
    return [data, *data.get("batches", {}).values(), *data.get("prefix_cache", {}).values()][-2:]


@pytest.mark.parametrize("what", SMALL)
def test_a_result_says_how_fast_how_soon_and_how_much_memory(results, what):
    parts = figures(results[what]["data"]) if what != "offline" else [results[what]["data"]]
    for part in parts:
        assert part["tokens_per_s"] > 0
        assert part["fraction_of_limit"] > 0
        assert part["first_token_ms"]["p50"] <= part["first_token_ms"]["p99"]
        assert list(part["between_tokens_ms"]) == ["p50", "p90", "p99"]
        assert part["memory"]["weight_bytes"] > 0
        assert part["memory"]["kv_pool_bytes"] > 0
        assert part["work"]["steps"] > 0


@pytest.mark.parametrize("what", SMALL)
def test_what_only_a_gpu_has_is_null_on_a_cpu(results, what):
    parts = figures(results[what]["data"]) if what != "offline" else [results[what]["data"]]
    assert all(part["idle"] is None and part["memory"]["peak_bytes"] is None for part in parts)


@pytest.mark.parametrize("what", SMALL)
def test_a_result_names_its_circumstances(results, what):
    assert results[what]["command"].startswith(f"python -m benchmarks.{what} --model")
    assert {"device", "versions", "commit", "date"} <= results[what].keys()


def test_latency_starts_so_many_requests_together(results):
    batches = results["latency"]["data"]["batches"]
    assert list(batches) == ["1", "3"]
    for batch, found in batches.items():
        [done] = found["passes"]
        assert (done["prompt_tokens"], done["output_tokens"]) == (5 * int(batch), 5 * int(batch))
        assert done["work"]["steps"] == 5


def test_no_two_batches_and_seeds_begin_alike():
    beginnings = {tuple(latency.prompts(seed, batch, 8)[0][:4]) for seed in (0, 1) for batch in (1, 16)}
    assert len(beginnings) == 4


def test_the_prefix_is_reused_with_the_cache_and_computed_without(results):
    off, on = (results["prefix"]["data"]["prefix_cache"][cache]["work"] for cache in prefix.CACHES)
    whole_pages = 51 // 16 * 16  # of 1,024 tokens, scaled
    assert (off["tokens_reused"], on["tokens_reused"]) == (0, 3 * whole_pages)
    assert off["tokens_computed"] - on["tokens_computed"] == 3 * whole_pages


def test_prompts_share_their_beginning_and_nothing_else():
    one, *others = prefix.prompts(0, requests=5, shared=20, own=10)
    assert all(other[:20] == one[:20] and other[20:] != one[20:] for other in others)


def test_a_result_is_shown_beside_an_earlier_one(bench, capsys):
    first = bench("offline", *SMALL["offline"])
    bench("offline", "--compare", str(first), *SMALL["offline"][:2], "--scale", "0.03")
    shown = capsys.readouterr().out
    assert "new/old" in shown
    assert "not the same: scale: 0.02 → 0.03" in shown


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--compare", "/no/such.json"], "such.json"),
        (["--chapter", "99"], "chapter 99 has no engine"),
        (["--requests", "2", "--max-model-len", "60"], "of 2 requests failed"),
    ],
)
def test_a_mistake_is_named(bench, capsys, options, problem):
    with pytest.raises(SystemExit) as end:
        bench("offline", *options)
    assert end.value.code == 1
    assert problem in capsys.readouterr().err


def test_a_choice_of_prefix_cache_is_refused_where_both_are_measured(bench, capsys):
    with pytest.raises(SystemExit):
        bench("prefix", "--prefix-cache", "none")
    assert "leave --prefix-cache out" in capsys.readouterr().err


@pytest.mark.parametrize("script", [offline, latency, prefix, ladder_offline])
def test_each_benchmark_explains_itself(script):
    text = script.parser().format_help()
    assert all(option in text for option in ("--json", "--compare", "minisgl bench"))


def test_a_request_has_as_many_times_as_tokens_and_they_grow(tiny_folder):
    with LLM(EngineConfig(model=str(tiny_folder), device="cpu", max_running_requests=2)) as llm:
        with measure.Steps(llm) as steps:
            done = llm.generate([[1] * 5, [2] * 6, [3] * 7], measure.SamplingParams(max_tokens=4, ignore_eos=True))
        times = steps.token_times(done)
        assert "step" not in vars(llm)
        assert "step" not in vars(llm.engine)
    assert [len(own) for own in times] == [4, 4, 4]
    assert all(own == sorted(own) for own in times)
    assert times[2][0] > times[0][3]  # the third waits for a place


def test_percentiles_lie_between_their_neighbours():
    assert measure.percentiles_ms([0.004, 0.001, 0.003, 0.002, 0.005], 50, 90) == pytest.approx({"p50": 3, "p90": 4.6})
    assert measure.percentiles_ms([], 50) is None


def test_the_median_of_passes_is_taken_figure_by_figure():
    passes = [{"a": a, "b": {"p50": b}, "c": None} for a, b in ((1, 30), (2, 10), (9, 20))]
    assert measure.medians(passes, "a", "b", "c") == {"a": 2, "b": {"p50": 20}, "c": None}


def test_every_engine_has_a_place_on_the_ladder():
    chapters = ladder.chapters()
    assert chapters == list(range(1, len(chapters) + 1))
    assert set(chapters) <= set(ladder.TITLES)


def test_the_gpus_ladder_is_reached_through_the_ladder(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ladder", "--offline"])
    monkeypatch.setattr(ladder_offline, "main", lambda: "there")
    assert ladder.main() == "there"


def test_slow_engines_get_the_first_of_the_same_requests(tiny_folder):
    options = ["--model", str(tiny_folder), "--device", "cpu", "--requests", "5", "--scale", "0.02", "--warmup", "none"]
    args = ladder_offline.parser().parse_args(options)
    done = ladder_offline.run(2, None, args)
    prompts, outputs = offline.workload(0, 5, 0.02)
    assert done["requests"] == 2
    assert done["prompt_tokens"] == sum(map(len, prompts[:2]))
    assert done["output_tokens"] == sum(outputs[:2])


def test_rows_of_another_workload_are_not_kept(tmp_path):
    rows = {"5": {"chapter": 5}}
    data = {"model": "qwen3-0.6b", "seed": 0, "requests": 256, "scale": 1.0, "max_output": 0, "chapters": rows}
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"date": "a day", "commit": "abc", "data": data}))
    parse = ladder_offline.parser().parse_args
    [kept] = ladder_offline.rows_before(parse(["--add", "--json", str(path)])).values()
    assert kept == rows["5"] | {"measured": "a day, commit abc"}
    assert ladder_offline.rows_before(parse(["--json", str(path)])) == {}
    with pytest.raises(ValueError, match="seed of the rows there differ"):
        ladder_offline.rows_before(parse(["--add", "--json", str(path), "--seed", "1"]))
