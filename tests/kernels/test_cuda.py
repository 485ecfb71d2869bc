"""Decode attention in CUDA C++: all steps of the ladder, in the emulator on a CPU and as they are on a GPU."""

from __future__ import annotations

import pytest
import torch
from minisgl_kernels import cuda
from minisgl_kernels.cpu.build import BuildError, find_compiler
from minisgl_kernels.cuda.build import source_path

from tests.kernels.cuda_cases import Paged

STEPS = list(cuda.STEPS)
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SHAPES = [(F32, 64, 1), (BF16, 128, 2), (F16, 80, 3), (F32, 128, 4), (BF16, 64, 8)]  # dtype, head_dim, group


def on_gpu() -> bool:
    return torch.cuda.is_available()


@pytest.fixture
def device():
    if on_gpu():
        if reason := cuda.why_unavailable(torch.device("cuda"), F16):
            pytest.skip(reason)
        return "cuda"
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(f"the emulator needs a C++ compiler: {error}")
    return "cpu"


def check(paged, window=0, **options):
    paged.check(cuda.paged_decode, window, **options)


@pytest.mark.parametrize(("dtype", "head_dim", "group"), SHAPES, ids=lambda value: str(value).removeprefix("torch."))
@pytest.mark.parametrize("step", STEPS)
def test_a_query_attends_to_all_keys_of_its_sequence(step, dtype, head_dim, group, device):
    for page_size, lens in [(1, [1, 33]), (3, [31, 2, 130]), (16, [15, 16, 17, 64]), (64, [65, 127])]:
        check(Paged(lens, dtype, page_size, group, head_dim=head_dim, device=device), step=step, seed=page_size)


@pytest.mark.parametrize("step", STEPS)
def test_with_a_window_only_the_last_keys_are_seen(step, device):
    paged = Paged([100, 7, 40], F32, page_size=3, device=device)
    for window in (1, 7, 33):
        check(paged, window, step=step)


@pytest.mark.parametrize("step", STEPS)
def test_sequences_with_other_than_one_query_are_left_alone(step, device):
    check(Paged([20, 30, 9, 50], F32, queries=[1, 5, 0, 1], device=device), step=step)


@pytest.mark.parametrize("step", STEPS)
def test_rows_may_lie_apart(step, device):
    check(Paged([20, 35], F32, pad=8, device=device), step=step)


@pytest.mark.parametrize("step", STEPS)
def test_scores_whose_exponentials_do_not_fit_an_fp32(step, device):
    paged = Paged([70], F32, device=device)
    paged.q *= 1000  # an fp32 score of some thousand is off by 1e-4, and so is its exponential

    assert paged.error(cuda.paged_decode, step=step) < 1e-2


@pytest.mark.parametrize("step", STEPS)
def test_a_nan_among_the_keys_reaches_its_sequence_and_no_other(step, device):
    paged = Paged([40, 40], F32, device=device)
    paged.keys[paged.rows[0][5]] = torch.nan

    out = paged.run(cuda.paged_decode, step=step)

    assert out[0].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("num_splits", [1, 2, 3, 7, 64])
def test_any_number_of_splits_gives_the_result(num_splits, device):
    for window in (0, 50):
        check(Paged([1, 16, 129, 300], F32, device=device), window, num_splits=num_splits)


def test_splits_fill_the_gpu_once_and_no_more_than_keys_allow(monkeypatch):
    monkeypatch.setattr(cuda, "_multiprocessors", lambda _: 132)
    gpu = torch.device("cuda")

    assert cuda.splits_for(2048, 1024, 2, gpu) == 1
    assert cuda.splits_for(128, 1024, 2, gpu) == 5
    assert cuda.splits_for(8, 32768, 2, gpu) == 82
    assert cuda.splits_for(8, 100, 2, gpu) == 1


def test_an_empty_batch_is_no_work():
    q, kv, none = torch.zeros(0, 2, 64), torch.zeros(4, 1, 64), torch.zeros(0, dtype=torch.int64)

    out = cuda.paged_decode(q, kv, kv, torch.zeros(0, 1, dtype=torch.int64), 4, none, torch.zeros(1).long(), 1.0)

    assert out.shape == (0, 2, 64)


def int64(*values):
    return torch.tensor(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 7}, "the ladder has 1 to 6"),
        ({"q": torch.zeros(1, 2, 64).double()}, "float64.*--attention triton or torch"),
        ({"values": torch.zeros(4, 1, 64).half()}, "all in one of"),
        ({"q": torch.zeros(1, 2, 32)}, "do not fit"),
        ({"q": torch.zeros(1, 17, 64)}, "17 query heads share a KV head: at most 16, or use --attention"),
        ({name: torch.zeros(4, 1, 264) for name in ("q", "keys", "values")}, "head_dim is 264.*--attention"),
        ({name: torch.zeros(4, 1, 60) for name in ("q", "keys", "values")}, "head_dim is 60"),
        (
            {"keys": torch.zeros(4, 1, 66)[..., :64]},
            "keys must be contiguous in head_dim, with rows at multiples of 16",
        ),
        ({"keys": torch.zeros(4, 64, 1).transpose(1, 2).contiguous().as_strided((4, 1, 64), (1, 64, 4))}, "keys must"),
        ({"kv_lens": int64(1, 2)}, "2 kv_lens"),
        ({"kv_lens": torch.ones(1, dtype=torch.int32)}, "int64"),
        ({"page_size": 0}, "pages of 0"),
        ({"q": torch.zeros(1, 2, 64, device="meta")}, "no CUDA attention on meta"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_it_cannot_is_an_error_that_says_so(change, message):
    arguments = {
        "q": torch.zeros(1, 2, 64),
        "keys": torch.zeros(4, 1, 64),
        "values": torch.zeros(4, 1, 64),
        "page_table": torch.zeros(1, 1, dtype=torch.int64),
        "page_size": 4,
        "kv_lens": int64(1),
        "query_starts": int64(0, 1),
        "scale": 1.0,
    }

    with pytest.raises(ValueError, match=message):
        cuda.paged_decode(**arguments | change)


def test_the_backend_says_where_it_does_not_run():
    assert "NVIDIA GPU" in cuda.why_unavailable(torch.device("cpu"), F32)
    assert "torch.float64" in cuda.why_unavailable(torch.device("cuda"), torch.float64)


# ---- What the emulator finds: each of these is a plausible mistake.

BARRIER, WAIT = "        __syncthreads();\n", "wait_for_copies<1>();"
TILES, ASYNC, SPLIT = "decode_2_tiles.cu", "decode_5_async.cu", "decode_6_split.cu"
MISTAKES = [  # step, source, what stands there, what stands there by mistake, what happens then
    (2, TILES, BARRIER + "\n        for", "\n        for", "scores of a tile that is not there yet"),
    (2, TILES, BARRIER + "    }", "    }", "a tile overwritten while others read it"),
    (5, ASYNC, WAIT + "\n        __syncthreads();", WAIT, "copies that the others do not see"),
    (5, ASYNC, BARRIER + "        buffer =", "        buffer =", "a buffer refilled while others read it"),
    (5, ASYNC, "        " + WAIT, "", "a tile that has not landed"),
    (5, ASYNC, WAIT, "wait_for_copies<2>();", "a wait for one group too few"),
    (6, SPLIT, "wait_for_copies<STAGES - 1>();", "", "a warp's tile that has not landed"),
    (6, SPLIT, "fast_exp2(a.lse[at + s] - top[0])", "1.0f", "splits that all weigh the same"),
    (3, "warp.cuh", "bit = LANES / 2", "bit = LANES / 4", "a sum over half of the lanes"),
    (6, "rows.cuh", "lane.acc[g][e] *= correction", "lane.acc[g][e] *= 1.0f", "sums that refer to an old maximum"),
    (4, "decode.cuh", "[d] * fast_exp2(shared.top[w][h] - highest)", "[d]", "warps that all weigh the same"),
]


@pytest.mark.skipif(on_gpu(), reason="the emulator runs on CPU tensors; a GPU rarely shows these")
@pytest.mark.parametrize(("step", "name", "right", "wrong", "why"), MISTAKES, ids=[m[-1] for m in MISTAKES])
def test_a_mistake_gives_a_wrong_answer(step, name, right, wrong, why, tmp_path, monkeypatch, device):
    text = source_path(name).read_text()
    assert text.count(right) == 1, "the mistake no longer applies to the source"
    (tmp_path / name).write_text(text.replace(right, wrong))
    monkeypatch.setenv("MINISGL_CUDA_SOURCES", f"{name}={tmp_path / name}")
    paged = Paged([300], F32, page_size=16, device=device)

    errors = [paged.error(cuda.paged_decode, step=step, num_splits=2, seed=seed) for seed in range(3)]

    assert any(not error < 1e-3 for error in errors), why


@pytest.mark.skipif(on_gpu(), reason="the emulator runs on CPU tensors")
def test_the_order_of_threads_changes_no_bit(device):
    paged = Paged([150, 40], F32, device=device)
    for step in STEPS:
        first = paged.run(cuda.paged_decode, step=step)
        for seed in (1, 2, 3):
            assert torch.equal(paged.run(cuda.paged_decode, step=step, seed=seed), first)


@pytest.mark.skipif(on_gpu(), reason="the emulator runs on CPU tensors")
def test_lanes_that_wait_in_different_places_are_an_error(tmp_path, monkeypatch, device):
    text = source_path("decode_3_warps.cu").read_text()
    (tmp_path / "wrong.cu").write_text(
        text.replace("dot = warp_sum<32>(dot);", "if (threadIdx.x % 32) dot = warp_sum<32>(dot); else __syncthreads();")
    )
    monkeypatch.setenv("MINISGL_CUDA_SOURCES", f"decode_3_warps.cu={tmp_path / 'wrong.cu'}")

    with pytest.raises(RuntimeError, match="lanes of one warp wait in different places"):
        Paged([40], F32, device=device).run(cuda.paged_decode, step=3)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_results_are_rounded_to_the_nearest_ties_to_even(dtype, device):
    """A query of zeros gives two keys the same weight: the mean of neighbouring numbers is a tie."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device).to(torch.int16).view(dtype)
    numbers = numbers[(numbers.abs() < 3e4) & (numbers.abs() > 1e-4)]
    numbers = numbers[: len(numbers) // 64 // 8 * 64 * 8].view(-1, 1, 64)
    paged = Paged([2] * len(numbers), dtype, page_size=2, group=1, kv_heads=1, device=device)
    paged.q.zero_()
    first, second = torch.stack(paged.rows).T
    paged.values[first], paged.values[second] = numbers, numbers.view(torch.int16).bitwise_xor(1).view(dtype)

    means = (paged.values[first].float() + paged.values[second].float()) / 2
    assert torch.equal(paged.run(cuda.paged_decode, step=6), means.to(dtype))
