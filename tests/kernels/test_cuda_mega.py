"""A decode step in one persistent kernel: in the emulator on a CPU and as it is on a GPU."""

from __future__ import annotations

import pytest
import torch
from minisgl_kernels.cpu.build import BuildError, find_compiler
from minisgl_kernels.cuda import build, mega
from minisgl_kernels.cuda import compile as command
from minisgl_kernels.cuda.build import source_path

from tests.kernels.mega_cases import Model
from tests.tolerances import MEGA_LOGITS, MEGA_NEW_KV

QWEN = {"BLOCK_WARPS": 2, "DEPTH": 3, "TOGETHER": 2}  # of the emulated kernels: few, for each takes seconds to compile
LLAMA = dict(qk_norm=False, tied=False, heads=3, kv_heads=1, hidden=192, intermediate=320)


def on_gpu() -> bool:
    return torch.cuda.is_available()


@pytest.fixture
def device():
    if on_gpu():
        if reason := mega.why_unavailable(torch.device("cuda"), torch.float16, 128, 192, 4, 2, 64, 264):
            pytest.skip(reason)
        return "cuda"
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(f"the emulator needs a C++ compiler: {error}")
    return "cpu"


def check(model, blocks=8, splits=0, seed=0):
    """Fail unless logits and pool are as computed in fp64, twice."""
    step = model.step(blocks=blocks, macros=QWEN, seed=seed)
    expected, kv = model.expected()
    for _ in range(2):
        logits = model.run(step, splits=splits)
        MEGA_LOGITS.check(logits.double() / expected.std(), expected / expected.std())
        assert torch.equal(model.kv.isnan(), kv.isnan())
        MEGA_NEW_KV.check(model.newest(model.kv).double(), model.newest(kv))


@pytest.mark.parametrize("lens", [[1], [17], [47, 130], [100, 1, 16]], ids=len)
def test_a_step_of_qwen3(lens, device):
    check(Model(lens, device=device))


@pytest.mark.parametrize("lens", [[15], [16, 33, 100]], ids=len)
def test_a_step_of_llama(lens, device):
    check(Model(lens, page_size=1, device=device, **LLAMA))


@pytest.mark.parametrize("blocks", [6, 7, 40])
def test_the_grid_may_have_any_number_of_blocks(blocks, device):
    check(Model([33, 5, 64], device=device), blocks=blocks)


@pytest.mark.parametrize("splits", [2, 5])
def test_parts_of_the_keys_are_put_together(splits, device):
    check(Model([100, 1, 47], device=device), blocks=30, splits=splits)


@pytest.mark.skipif(on_gpu(), reason="the emulator runs on CPU tensors")
def test_the_order_of_threads_does_not_matter(device):
    model = Model([100, 1, 47])
    results = [model.run(model.step(blocks=18, macros=QWEN, seed=seed)) for seed in range(3)]

    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.skipif(on_gpu(), reason="the emulator runs on CPU tensors")
def test_a_block_that_does_not_send_is_an_error(tmp_path, monkeypatch, device):
    text = source_path("mega_machine.cuh").read_text()
    wrong = text.replace("    *to = {data, tag};", "    if (blockIdx.x > 0) *to = {data, tag};")
    assert wrong != text
    (tmp_path / "wrong.cuh").write_text(wrong)
    monkeypatch.setenv("MINISGL_CUDA_SOURCES", f"mega_machine.cuh={tmp_path / 'wrong.cuh'}")
    model = Model([5], layers=1)

    with pytest.raises(RuntimeError, match="blocks wait for each other for ever"):
        model.run(model.step(blocks=2, macros=QWEN))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(dtype=torch.float32), "float16 and bfloat16"),
        (dict(hidden=96), "hidden_size to be a multiple of 64"),
        (dict(intermediate=200), "intermediate_size to be a multiple of 64"),
        (dict(vocab=101), "vocab_size to be a multiple of 2"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_what_it_cannot_do_is_refused(change, reason):
    with pytest.raises(ValueError, match=reason):
        Model([3], **change).step(blocks=1)


def test_more_rows_than_it_takes_are_refused():
    model = Model([1] * 5)
    step = model.step(blocks=1)

    with pytest.raises(ValueError, match="5 rows"):
        model.run(step)


def test_it_compiles_without_a_gpu():
    try:
        build.nvrtc_version()
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"cuda-core with NVRTC is not installed: {error}")
    macros = command.MEGA | {"DTYPE": "bf16", "HEAD_DIM": 128, "GROUP": 2, "BATCH": 4}

    assert build.compile_cuda(mega.SOURCE, macros, "sm_90").startswith(b"\x7fELF")


@pytest.mark.gpu
@pytest.mark.skipif(not on_gpu(), reason="needs an NVIDIA GPU")
def test_a_captured_step_follows_ids_and_positions(device):
    model = Model([40, 100], torch.bfloat16, device=device)
    step = model.step()
    ids, positions = model.input_ids.clone(), model.positions.clone()
    expected = model.run(step)
    model.input_ids.zero_(), model.positions.zero_()
    model.run(step)
    graph = torch.cuda.CUDAGraph()
    logits = torch.empty_like(expected)
    with torch.cuda.graph(graph):
        step(model.input_ids, model.positions, model.page_table, *model.rope, logits)
    model.input_ids.copy_(ids), model.positions.copy_(positions)
    graph.replay()

    assert torch.equal(logits, expected)
