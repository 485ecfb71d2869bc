"""The products of decode batches against float64: in the interpreter, or in full size where there is a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import minisgl_kernels
import triton
from minisgl_kernels import reference
from minisgl_kernels.launches import overlapping
from minisgl_kernels.triton import decode_ops as ops
from minisgl_kernels.triton import pdl, products, skinny
from minisgl_kernels.triton.gemv import Rows, gemv
from minisgl_kernels.triton.norm import rms_norm_kernel
from minisgl_kernels.triton.products import MOST_TOKENS, kernel_for, rows_for, tile_for
from minisgl_kernels.triton.qkv import apply_rope_kernel
from minisgl_kernels.triton.skinny import Tile, product

from tests.tolerances import LINEAR, LINEAR_GATED

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-5
QWEN3 = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)]  # outputs and width of its products
OTHERS = [*QWEN3, (151936, 1024), (12288, 4096), (4096, 11008), (22016, 4096), (576, 1536), (1536, 576)]
LIMITS = [  # of outputs, width, a gate: the most tokens that are not torch's
    (4096, 1024, False, 16), (1024, 2048, False, 32), (3072, 1024, True, 16), (1024, 3072, False, 32),
    (151936, 1024, False, 64), (4096, 11008, False, 32), (11008, 4096, True, 16), (32000, 4096, False, 64),
]  # fmt: skip


@pytest.fixture(params=[torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
def dtype(request):
    if reason := ops.why_unavailable(DEVICE, request.param):
        pytest.skip(reason)
    if DEVICE.type == "cuda" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("before sm_80 all products are torch's")
    return request.param


@pytest.fixture
def gpu():
    if DEVICE.type != "cuda":
        pytest.skip("needs an NVIDIA GPU")


@pytest.fixture(autouse=True)
def poisoned():
    """What an op allocates and does not write is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def random(*shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).to(dtype)


def tokens_and_weight(tokens, outputs, width, dtype):
    """x [tokens, width] with NaN between its rows, and a weight that keeps the size of numbers."""
    wide = torch.full((tokens, width + 8), torch.nan, dtype=dtype, device=DEVICE)
    wide[:, :width] = random(tokens, width, dtype=dtype)
    weight = (random(outputs, width, dtype=torch.float32, seed=1) / width**0.5).to(dtype)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()  # a product may read weights before the kernel before it ends
    return wide[:, :width], weight


def exact(x, weight):
    return x.double() @ weight.double().T


def exact_gated(x, weight):
    return reference.silu_and_mul(exact(x, weight))


@pytest.mark.parametrize(
    ("outputs", "width", "block_n", "block_k"),
    [(16, 64, 4, 64), (37, 100, 8, 128), (5, 200, 2, 64), (1, 16, 4, 16), (9, 130, 1, 32)],
)
@pytest.mark.parametrize("tokens", [1, 2, 3, 7])
def test_gemv_multiplies_each_token_with_each_row(tokens, outputs, width, block_n, block_k, dtype):
    x, weight = tokens_and_weight(tokens, outputs, width, dtype)

    y = gemv(x, weight, Rows(block_n, block_k, 4))

    assert y.dtype == dtype
    LINEAR[dtype].check(y.double(), exact(x, weight))


@pytest.mark.parametrize(("width", "block_k"), [(64, 64), (100, 64), (96, 128)])
def test_gemv_gates_with_the_first_half_of_the_rows(width, block_k, dtype):
    x, weight = tokens_and_weight(3, 2 * 13, width, dtype)

    y = gemv(x, weight, Rows(4, block_k, 4), is_gated=True)

    assert y.shape == (3, 13)
    LINEAR_GATED[dtype].check(y.double(), exact_gated(x, weight))


TILES = [Tile(16, 16, 32, 1, 4, 3), Tile(32, 16, 32, 3, 4, 3), Tile(16, 32, 64, 4, 4, 2), Tile(64, 16, 128, 2, 4, 2)]


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(("tokens", "outputs", "width"), [(1, 16, 256), (5, 70, 256), (16, 33, 200), (37, 100, 96)])
def test_product_covers_every_token_output_and_column(tokens, outputs, width, tile, dtype):
    x, weight = tokens_and_weight(tokens, outputs, width, dtype)

    LINEAR[dtype].check(product(x, weight, tile).double(), exact(x, weight))


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_product_gates_after_the_splits_are_summed(tile, dtype):
    x, weight = tokens_and_weight(19, 2 * 37, 200, dtype)

    y = product(x, weight, tile, is_gated=True)

    assert y.shape == (19, 37)
    LINEAR_GATED[dtype].check(y.double(), exact_gated(x, weight))


def test_split_products_leave_their_counters_at_zero_and_give_the_same_bits_again(dtype):
    x, weight = tokens_and_weight(9, 100, 256, dtype)
    tile = Tile(16, 16, 32, 8, 4, 2)

    results = [product(x, weight, tile) for _ in range(5)]

    assert not skinny._arrivals(x.device).any()
    assert all(torch.equal(y, results[0]) for y in results)


@pytest.mark.parametrize("tokens", [1, 4, 5, 16, 17, 33, 70])
def test_linear_is_the_product_for_any_number_of_tokens(tokens, dtype):
    x, weight = tokens_and_weight(tokens, 48, 128, dtype)

    LINEAR[dtype].check(ops.linear(x, weight).double(), exact(x, weight))
    LINEAR_GATED[dtype].check(ops.linear_silu_mul(x, weight).double(), exact_gated(x, weight))


def test_a_gated_product_with_a_bias_is_that_of_its_definition(dtype):
    x, weight = tokens_and_weight(3, 48, 128, dtype)
    bias = random(48, dtype=dtype, seed=4)

    out = ops.linear_silu_mul(x, weight, bias)

    expected = reference.silu_and_mul(exact(x, weight) + bias.double())
    LINEAR_GATED[dtype].check(out.double(), expected)


def test_float32_and_a_bias_are_left_to_torch(dtype):
    x, weight = tokens_and_weight(3, 48, 128, torch.float32)
    assert torch.equal(ops.linear(x, weight), reference.linear(x, weight))

    x, weight, bias = x.to(dtype), weight.to(dtype), random(48, dtype=dtype, seed=4)
    assert torch.equal(ops.linear(x, weight, bias), reference.linear(x, weight, bias))


def test_a_gated_product_refuses_an_odd_number_of_rows(dtype):
    x, weight = tokens_and_weight(3, 7, 64, dtype)

    with pytest.raises(ValueError, match="7 rows do not halve"):
        ops.linear_silu_mul(x, weight)


@pytest.mark.parametrize(("outputs", "width", "is_gated", "most"), LIMITS)
def test_few_tokens_are_ours_and_many_are_torchs(outputs, width, is_gated, most):
    kernels = [kernel_for(tokens, outputs, width, is_gated) for tokens in range(MOST_TOKENS + 1)]

    assert [tokens for tokens, kernel in enumerate(kernels) if kernel] == list(range(1, most + 1))
    in_rows = [isinstance(kernel, Rows) for kernel in kernels[1 : most + 1]]
    assert in_rows == sorted(in_rows, reverse=True)  # tensor cores take over once
    assert not in_rows[4]


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("outputs", "width"), OTHERS)
@pytest.mark.parametrize("tokens", [1, 2, 5, 16, 32, 33, 64])
def test_every_choice_is_one_that_the_kernels_know(tokens, outputs, width, is_gated):
    rows, tile = rows_for(tokens, width, is_gated), tile_for(tokens, outputs, width, is_gated)

    for power in (*rows, *tile[:3], tile.num_warps):
        assert power > 0
        assert power & (power - 1) == 0
    area = tile.block_n * (1 + is_gated) + tile.block_t
    assert area * tile.block_k * 2 * tile.num_stages <= 160 * 1024  # bytes, of sm_80's 163 KB
    assert area * tile.block_k * 2 * (tile.num_stages - 1) <= 96 * 1024  # of the 99 KB of sm_86 and sm_89
    tiles = triton.cdiv(tokens, tile.block_t) * triton.cdiv(outputs, tile.block_n)
    assert tile.splits == 1 or tiles <= skinny.MOST_TILES
    assert tile.splits == 1 or triton.cdiv(width, tile.splits) >= tile.block_k


def test_a_gpu_with_little_shared_memory_gets_a_shorter_pipeline(monkeypatch):
    linear, stages = sys.modules[kernel_for.__module__], []
    monkeypatch.setattr(linear, "product", lambda x, weight, tile, is_gated: stages.append(tile.num_stages) or x)
    x, weight = tokens_and_weight(8, 48, 512, torch.float16)

    for large in (True, False):
        monkeypatch.setattr(linear, "has_large_memory", lambda device, large=large: large)
        ops.linear(x, weight)

    assert stages == [stages[0], stages[0] - 1]


def test_products_of_our_own_are_in_the_ops_of_chapter_8_and_not_in_those_of_chapter_7():
    before, with_them = (minisgl_kernels.implementation("triton", on) for on in (False, True))
    of_both = [name for name in before.__all__ if name not in ("linear", "linear_silu_mul")]

    assert before.linear is reference.linear
    assert (with_them.linear, with_them.linear_silu_mul) == (products.linear, products.linear_silu_mul)
    assert [getattr(before, name) for name in of_both] == [getattr(with_them, name) for name in of_both]
    assert minisgl_kernels.implementation("torch", True) is reference


@pytest.mark.parametrize("hidden", [24, 64])
def test_the_gate_behind_torchs_product_is_its_definition(hidden):
    x, weight = tokens_and_weight(3, 2 * 40, hidden, torch.float32)
    if reason := ops.why_unavailable(DEVICE, x.dtype):
        pytest.skip(reason)

    y = minisgl_kernels.implementation("triton").linear_silu_mul(x, weight)

    torch.testing.assert_close(y, reference.linear_silu_mul(x, weight))


def test_kernels_overlap_only_within_the_block_that_says_so(monkeypatch):
    monkeypatch.setattr(pdl, "_can_overlap", lambda device: True)
    monkeypatch.setattr(pdl, "_waits", lambda kernel: True)
    before = pdl.overlap(rms_norm_kernel, DEVICE)

    assert before == {}
    with overlapping():
        assert pdl.overlap(rms_norm_kernel, DEVICE) == {"PDL": True, "launch_pdl": True}
        with overlapping(False):
            assert pdl.overlap(rms_norm_kernel, DEVICE) == {}
    assert pdl.overlap(rms_norm_kernel, DEVICE) == before


@pytest.mark.gpu
def test_a_kernel_that_never_waits_is_not_let_in_early(gpu):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs sm_90")

    with overlapping():
        assert pdl.overlap(rms_norm_kernel, DEVICE)
        assert not pdl.overlap(apply_rope_kernel, DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "width"), QWEN3, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 8, 16, 32, 33, 64, 128])
def test_products_of_qwen3(tokens, outputs, width, dtype, gpu):
    x, weight = tokens_and_weight(tokens, outputs, width, dtype)

    LINEAR[dtype].check(ops.linear(x, weight).double(), exact(x, weight))
    LINEAR_GATED[dtype].check(ops.linear_silu_mul(x, weight).double(), exact_gated(x, weight))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 16, 32])
def test_a_graph_of_overlapping_kernels_gives_the_bits_of_one_after_another(tokens, gpu):
    """Each layer reads what the kernel before has just written: one that does not wait sees the layer before."""
    dtype, hidden, inner = torch.bfloat16, 1024, 3072
    if reason := ops.why_unavailable(DEVICE, dtype):
        pytest.skip(reason)
    layers = [
        [(random(n, k, dtype=torch.float32, seed=10 * i + j) / k**0.5).to(dtype) for j, (n, k) in enumerate(shapes)]
        for i, shapes in enumerate([[(2 * inner, hidden), (hidden, inner)]] * 6)
    ]
    norm_weight, x = random(hidden, dtype=dtype), random(tokens, hidden, dtype=dtype, seed=1)

    def decode():
        y, residual = x, torch.zeros_like(x)
        for up, down in layers:
            y, residual = ops.add_rms_norm(y, residual, norm_weight, EPS)
            y = ops.linear(ops.linear_silu_mul(y, up), down)
        return ops.add_rms_norm(y, residual, norm_weight, EPS)[0]

    def replayed(on):
        with overlapping(on):
            decode()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = decode()
        for i in range(20):
            x.copy_(random(tokens, hidden, dtype=dtype, seed=i))
            graph.replay()
            yield out.clone()

    for overlapped, alone in zip(list(replayed(True)), list(replayed(False)), strict=True):
        assert torch.equal(overlapped, alone)


# Prints the order of what matters in the PTX of both kernels, with and without programmatic dependent launch.
ORDER = """
import dataclasses, re
from minisgl_kernels.triton import compile, gemv, skinny
for module in (gemv, skinny):
    case = next(c for c in module.COMPILE_CASES if "*bf16" in c.types.values())
    for on in (False, True):
        ptx = compile.compile_case(dataclasses.replace(case, constants=case.constants | {"PDL": on}), 90).asm["ptx"]
        found = re.findall(r"launch_dependents|griddepcontrol.wait|prefetch.global|ld.global|st.global", ptx)
        print(case.kernel.__name__, on, *dict.fromkeys(found))
"""


def test_a_kernel_that_is_let_in_early_asks_for_weights_first_and_waits_before_all_else(tmp_path):
    if not (Path(triton.__file__).parent / "backends/nvidia/bin").exists():
        pytest.skip("this Triton brings no ptxas")
    (tmp_path / "order.py").write_text(ORDER)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": os.pathsep.join([str(Path(minisgl_kernels.__file__).parents[1]), *sys.path])}

    done = subprocess.run([sys.executable, tmp_path / "order.py"], env=env, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    order = dict(re.findall(r"^(\w+ \w+) (.*)$", done.stdout, re.MULTILINE))
    wait = "griddepcontrol.wait"
    assert wait not in order["gemv_kernel False"] + order["product_kernel False"]
    gemv_order, product_order = order["gemv_kernel True"].split(), order["product_kernel True"].split()
    assert gemv_order.index("launch_dependents") < gemv_order.index("ld.global") < gemv_order.index(wait)
    assert gemv_order.index(wait) < gemv_order.index("st.global")
    assert product_order[:3] == ["launch_dependents", "prefetch.global", wait]
