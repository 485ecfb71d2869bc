"""The arithmetic of the kernels' benchmarks, and counted bytes; no speed is tested here."""

from __future__ import annotations

import sys

import pytest
import torch
from minisgl_kernels import reference

from benchmarks import ch06_attention, ch07_fused, gpu, ladder_offline

LIMITS = {"copy_tb_s": 4.0, "matmul_tflop_s": 800.0}
SCRIPTS = [ch06_attention, ch07_fused, ladder_offline]


def ended(script, monkeypatch, *arguments):
    """The exit status of a script that ends early."""
    monkeypatch.setattr(sys, "argv", [script.__name__, *arguments])
    with pytest.raises(SystemExit) as end:
        script.main()
    return end.value.code


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_explains_itself(script, monkeypatch, capsys):
    assert ended(script, monkeypatch, "--help") == 0
    assert "--name" in capsys.readouterr().out


@pytest.mark.parametrize("script", SCRIPTS[:2])
def test_without_a_gpu_it_says_so_and_writes_nothing(script, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "save", lambda *_: pytest.fail("wrote a result"))
    assert ended(script, monkeypatch) == 2
    assert "torch finds none" in capsys.readouterr().err


def test_the_floor_is_what_takes_longer_of_bytes_and_operations():
    assert gpu.floor_us(LIMITS, moved=4e6) == pytest.approx(1)
    assert gpu.floor_us(LIMITS, moved=4e6, flops=1.6e9) == pytest.approx(2)


def test_launches_rotate_over_more_than_the_cache_holds():
    assert gpu.sets_for(1e9) == 1
    assert gpu.sets_for(67e6) * 67e6 >= 4 * 60e6
    assert gpu.sets_for(1.0) == 64


def test_a_wrong_or_unwritten_result_is_not_timed():
    expected = torch.ones(3)
    assert gpu.checked(lambda: expected * 1.001, [expected], 1e-2) == pytest.approx(1e-3, rel=1e-2)
    with pytest.raises(ValueError, match="not worth timing"):
        gpu.checked(lambda: expected * 1.1, [expected], 1e-2)
    with pytest.raises(ValueError, match="nan"):
        gpu.checked(lambda: torch.empty(3), [expected], 1e-2)


def test_a_part_that_fails_is_named_and_costs_no_other(monkeypatch, capsys):
    saved = []
    monkeypatch.setattr(gpu, "save", lambda name, data, device: saved.append(dict(data)))

    def broken(data):
        raise ValueError("no such kernel")

    assert gpu.measure("x", {"first": broken, "second": lambda data: 2}, {}) == 1
    assert saved[-1]["failed"] == {"first": "ValueError: no such kernel"}
    assert saved[-1]["second"] == 2


def test_decode_moves_k_and_v_of_every_token_and_two_rows_a_sequence():
    assert ch06_attention.decode_bytes([1024]) == 2 * (2 * 1024 * 8 * 128 + 2 * 16 * 128)
    assert ch06_attention.CASES[0].bytes == pytest.approx(1.076e9, rel=1e-3)


def test_the_cases_are_those_that_the_page_names():
    found = {(case.name, case.page_size) for case in ch06_attention.CASES}
    assert {("256x1024", page_size) for page_size in (1, 16, 64, 256)} < found
    assert {("ragged", 16), ("16x1024", 16), ("1x32768", 16), ("256x600", 16)} < found
    assert all(100 <= length <= 2000 for length in ch06_attention.CASES[1].lens)


def test_causal_attention_needs_half_of_two_products():
    assert ch06_attention.causal_flops(1, 2048) == 16 * (2 * 2048 * 2048 * 128 * 2) // 2


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_sequences_are_whole_and_every_other_slot_is_nan(page_size):
    lens = [33, 7, 16]
    paged = ch06_attention.Paged(lens, page_size, device="cpu")
    owned = torch.zeros(len(paged.keys), dtype=torch.bool)
    for row, length in zip(paged.rows.page_table, lens, strict=True):
        places = torch.arange(length)
        slots = row[places // page_size] * page_size + places % page_size
        assert not owned[slots].any()
        owned[slots] = True
    assert torch.equal(paged.keys.isnan().all(dim=(1, 2)), ~owned)
    assert torch.equal(paged.values.isnan().any(dim=(1, 2)), ~owned)


def test_torch_attention_over_the_benchmark_s_sequences_gives_the_reference_s_result():
    paged = ch06_attention.Paged([33, 7, 16], 16, device="cpu")
    assert gpu.relative_error(ch06_attention.run_torch(paged)(), paged.expected()) < ch06_attention.MOST_ERROR


def test_prompts_end_their_sequences():
    paged = ch06_attention.Paged([20, 20], 16, queries=20, device="cpu")
    assert gpu.relative_error(ch06_attention.run_torch(paged)(), paged.expected()) < ch06_attention.MOST_ERROR


SMALL = {"hidden": 8, "width": 12, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 100}
BY_HAND = {
    "rms_norm": 2 * (3 * 8) * 2 + 8 * 2,
    "add_rms_norm": 4 * (3 * 8) * 2 + 8 * 2,
    "silu_and_mul": 3 * (24 + 12) * 2,
    "qk_norm_rope_store": 3 * (8 * 16 * 2 * 2 + 2 * 8 * 2 + 8) + 2 * 16 * 2,
    "embedding": 3 * (8 * 2 * 2 + 8),
    "sample": 3 * 100 * 2,
}


@pytest.mark.parametrize("op", BY_HAND)
def test_an_op_moves_each_input_and_output_once(op):
    assert ch07_fused.op_bytes(op, 3, SMALL) == BY_HAND[op]


@pytest.mark.parametrize("op", dict.fromkeys(case.op for case in ch07_fused.CASES))
def test_the_inputs_of_an_op_are_what_the_reference_takes(op, monkeypatch):
    monkeypatch.setitem(ch07_fused.SHAPES, "small", SMALL)
    case = ch07_fused.Case(op, "small", 3)
    args = ch07_fused.op_inputs(case, device="cpu")
    found = ch07_fused.outputs(case.function, getattr(reference, case.function), args)
    assert all(out.isfinite().all() for out in found)


def test_kernels_and_gpu_time_are_counted_from_a_trace():
    events = [{"cat": "kernel", "dur": 3}, {"cat": "cpu_op", "dur": 50}, {"cat": "gpu_memcpy", "dur": 2}, {"ph": "M"}]
    assert ch07_fused.count_kernels([*events, {"cat": "kernel", "dur": 5}]) == (2, 0.010)
    with pytest.raises(ValueError, match="no kernel"):
        ch07_fused.count_kernels(events[1:])


def test_the_summary_of_an_engine_is_its_pass_beside_the_limit():
    done = dict.fromkeys(ladder_offline.COPIED) | {"chapter": 6, "tokens_per_s": 50.0, "seconds": 20.0}
    row = ladder_offline.summary(done | {"work": {"steps": 400}, "first_token_s": 1.0}, limit_tokens_per_s=200.0)
    assert row["title"] == "attention kernels"
    assert (row["fraction_of_limit"], row["steps"], row["ms_per_step"]) == (0.25, 400, 50.0)


def test_cuda_is_one_engine_more():
    assert ladder_offline.engines([5, 6, 7], cuda=True) == [(5, None), (6, None), (7, None), (6, "cuda")]
    assert ladder_offline.engines([5], cuda=False) == [(5, None)]


def test_an_engine_answers_the_workload_and_says_what_it_ran_on(tiny_folder):
    args = ladder_offline.parser().parse_args(
        ["--model", str(tiny_folder), "--device", "cpu", "--requests", "3", "--scale", "0.02", "--dtype", "float32"]
    )
    done = ladder_offline.run(5, None, args)
    assert (done["chapter"], done["attention"], done["kernels"], done["dtype"]) == (5, "torch", "torch", "float32")
    assert done["tokens_per_s"] > 0


@pytest.fixture(scope="module")
def scores():
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    if not triton.knobs.runtime.interpret:
        pytest.skip("bytes are counted in Triton's interpreter, and here Triton compiles")
    from benchmarks import kernel_scores

    return kernel_scores


def test_the_scores_explain_themselves(scores, monkeypatch, capsys):
    assert ended(scores, monkeypatch, "--help") == 0
    assert "--chapters" in capsys.readouterr().out


def test_a_gather_moves_k_and_v_three_times(scores):
    kv, rest = 2 * 2 * 32 * 2 * 500, 2 * 2 * 4 * 32 * 2
    assert scores.attention_bytes((300, 200), (1, 1)) == kv + rest
    assert scores.gather_then_attend((300, 200), (1, 1)) == 3 * kv + rest


def test_an_addition_and_a_norm_move_five_tensors_where_four_are_needed(scores):
    tensor, weight = 2 * 16 * 256, 2 * 256
    assert scores.separate("add_rms_norm") == 5 * tensor + weight


def test_a_fused_kernel_is_counted_at_about_what_it_needs(scores):
    [kernel] = [row for row in scores.fused() if isinstance(row, scores.Kernel) and row.name == "silu_and_mul"]
    row = scores.counted(kernel)
    assert row["moved"] == row["distinct"] == row["needed"]
    assert (row["score"], row["per_needed"]) == (1.0, 1.0)


def test_splits_cost_partial_results(scores):
    one, four = (scores.counted(kernel) for kernel in scores.attention()[:2])
    partials = 2 * 4 * 2 * (32 + 1) * 4  # sequences, heads, splits that are used at least: a head and a sum in fp32
    assert one["written"] == 2 * 4 * 32 * 2
    assert four["written"] - one["written"] >= partials
