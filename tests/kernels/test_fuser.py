"""Generated kernels against the steps that they are made of, in the interpreter or on a GPU."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="needs the package triton")

import minisgl_kernels
from minisgl_kernels import fuser, registry
from minisgl_kernels.fuser import UnsupportedChain, activation, bias, fuse, matmul, norm, quantise, residual
from minisgl_kernels.fuser_steps import Activation, Residual, Step
from minisgl_kernels.registry import OpCheckError

from tests.tolerances import GENERATED

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
# A kernel is compiled for each: float16 stands in for bfloat16 where that cannot run.
DTYPES = [torch.float32, torch.bfloat16 if DEVICE.type == "cuda" else torch.float16]
if reason := minisgl_kernels.why_not("triton", DEVICE, torch.float16):
    pytest.skip(reason, allow_module_level=True)

NORM_GEMM_SILU = (norm(1e-6), matmul(), activation("silu"))
CHAINS = [
    (activation("silu"), residual()),
    (norm(1e-5),),
    (residual(), norm(1e-6), bias(), activation("gelu"), norm(1e-6)),
    (matmul(),),
    NORM_GEMM_SILU,
    (matmul(), bias(), activation("gelu"), residual()),
    (bias(), activation("relu"), matmul(), residual(), residual()),
    (residual(), norm(1e-6), matmul()),
]
QUANTISED = [
    (norm(1e-6), quantise("int8", per="row")),
    (norm(1e-6), matmul(), bias(), activation("silu"), quantise("int8")),
    (matmul(), residual(), quantise("fp8", per="row")),
]
SHAPES = [{"rows": 1, "columns": 50}, {"rows": 19, "columns": 129}, {"rows": 67, "columns": 72}]


def needs_gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(DEVICE.type != "cuda", reason="needs an NVIDIA GPU")(test))


def needs_fp8(test):
    missing = DEVICE.type == "cuda" and torch.cuda.get_device_capability() < (8, 9)
    return pytest.mark.skipif(missing, reason="fp8 needs a GPU of sm_89")(test)


def names(chain):
    return "+".join(type(step).__name__ for step in chain)


@pytest.fixture(scope="module", autouse=True)
def _own_cache_folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINISGL_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture
def fresh():
    """No op is known from other tests, and none stays for them."""
    fuse.cache_clear()
    yield
    fuse.cache_clear()


def draw(op, shape, dtype=torch.float32, seed=7):
    shape = {"inner": 200, **shape} if any(step == matmul() for step in op.steps) else shape
    return op.random_inputs(shape, DEVICE, dtype, torch.Generator(DEVICE).manual_seed(seed))


# What it computes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chain", CHAINS, ids=names)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s['rows']}x{s['columns']}")
def test_a_chain_gives_what_its_steps_give(chain, shape, dtype):
    op = fuse(*chain)
    args = draw(op, shape, dtype)

    out = op(*args)

    assert out.dtype == dtype
    GENERATED[dtype].check(out.double(), op.reference(*(arg.double() for arg in args)).double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chain", QUANTISED, ids=names)
@needs_fp8
def test_a_quantised_chain_differs_from_its_steps_by_few_roundings(chain, dtype):
    for result in registry.check(fuse(*chain).name, DEVICE, [dtype]):
        assert result.error <= result.tolerance


@pytest.mark.parametrize("dtype", dict.fromkeys([*DTYPES, torch.float16]), ids=str)
def test_the_worked_example_is_silu_of_the_product_with_the_normed_rows(dtype):
    x = 3 * torch.randn(5, 96, device=DEVICE)
    norm_weight, weight = torch.rand(96, device=DEVICE) + 0.5, torch.randn(40, 96, device=DEVICE) / 10
    x, norm_weight, weight = (t.to(dtype) for t in (x, norm_weight, weight))

    out = fuse(*NORM_GEMM_SILU)(x, norm_weight, weight)

    x, norm_weight, weight = (t.double() for t in (x, norm_weight, weight))
    normed = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm_weight
    GENERATED[dtype].check(out.double(), F.silu(normed @ weight.T))


def test_leading_dimensions_stay():
    op = fuse(matmul(), residual())
    x, weight, added = (torch.randn(size, device=DEVICE) for size in ((2, 3, 33), (20, 33), (2, 3, 20)))

    GENERATED[torch.float32].check(op(x, weight, added), x @ weight.T + added)


def test_rows_may_lie_apart_in_memory():
    op = fuse(norm(1e-6), residual())
    wide = torch.full((4, 100), torch.nan, device=DEVICE)
    x, added = wide[:, :40].normal_(), wide[:, 50:90].normal_()
    weight = torch.randn(40, device=DEVICE)

    GENERATED[torch.float32].check(op(x, weight, added), op.reference(x, weight, added))


def test_no_rows_give_no_rows():
    op = fuse(*NORM_GEMM_SILU)

    assert op(*draw(op, {"rows": 0, "columns": 24})).shape == (0, 24)


def test_int8_rounds_ties_to_even_and_saturates():
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 300.0, -128.5, -1e9]], device=DEVICE)
    zero, one = torch.zeros_like(x), torch.ones(1, device=DEVICE)

    out = fuse(residual(), quantise("int8"))(x, zero, one)

    assert out.tolist() == [[0, 2, 2, 0, -2, 126, 127, 127, -128, -128]]


@needs_fp8
def test_fp8_rounds_ties_to_even_and_saturates():
    every = torch.arange(-448, 449, device=DEVICE) / 2.0
    small = torch.arange(-300, 301, device=DEVICE) * 2.0**-13  # subnormal numbers, and ties between them
    x = torch.cat([every, small, torch.tensor([449.0, 1e9, -1e9], device=DEVICE)])[None]

    out = fuse(residual(), quantise("fp8"))(x, torch.zeros_like(x), torch.ones(1, device=DEVICE))

    assert torch.equal(out.float(), x.clamp(-448, 448).to(torch.float8_e4m3fn).float())


def test_the_scale_divides_each_row_by_its_own():
    x = torch.tensor([[10.0, 20.0], [10.0, 20.0]], device=DEVICE)
    scale = torch.tensor([1.0, 10.0], device=DEVICE)

    assert fuse(activation("relu"), quantise("int8", per="row"))(x, scale).tolist() == [[10, 20], [1, 2]]


# What it generates


@pytest.mark.parametrize("chain", CHAINS + QUANTISED, ids=names)
def test_the_source_is_the_same_each_time_and_names_each_step(chain, fresh):
    first = fuse(*chain).source
    fuse.cache_clear()

    assert fuse(*chain).source == first
    ast.parse(first)
    for step in chain:
        assert f"# {step!r}" in first


def test_one_kernel_reads_and_writes_each_tensor_in_one_place():
    source = fuse(norm(1e-6), matmul(), bias(), activation("silu"), residual(), quantise("int8")).source

    assert source.count("@triton.jit") == 1
    assert source.count("tl.store(") == 1
    assert source.count("tl.load(") == 6  # x, norm_weight, weight, bias, residual, scale


def test_equal_chains_are_generated_once(fresh, monkeypatch):
    generated = []
    generate = fuser.generate
    monkeypatch.setattr(fuser, "generate", lambda steps: generated.append(steps) or generate(steps))

    first = fuse(norm(1e-6), activation("silu"))
    assert fuse(norm(1e-6), activation("silu")) is first
    assert fuse(norm(1e-5), activation("silu")) is not first
    assert len(generated) == 2


def test_the_file_is_written_once_and_again_if_it_is_damaged(fresh, tmp_path, monkeypatch):
    monkeypatch.setenv("MINISGL_HOME", str(tmp_path))
    op = fuse(activation("relu"))
    op.kernel  # noqa: B018
    [path] = (tmp_path / "kernels").iterdir()
    assert path.read_text() == op.source
    written = path.stat().st_mtime_ns

    fuse.cache_clear()
    fuse(activation("relu")).kernel  # noqa: B018
    assert path.stat().st_mtime_ns == written

    path.write_text("no kernel")
    fuse.cache_clear()
    assert fuse(activation("relu")).kernel is not None
    assert path.read_text() == op.source


# Its check


def emits_another_activation(self, name):
    return ["value = value * tl.sigmoid(1.702 * value)"]


def forgets_the_value(self, name):
    return [f"value = tl.load({name}_ptr + row[:, None] * {name}_stride + col[None, :], mask=keep).to(tl.float32)"]


def ignores_the_stride(self, name):
    return [f"value += tl.load({name}_ptr + col[None, :], mask=keep, other=0.0).to(tl.float32)"]


@pytest.mark.parametrize(
    ("rule", "wrong", "chain"),
    [
        (Activation, emits_another_activation, (norm(1e-6), matmul(), activation("silu"))),
        (Residual, forgets_the_value, (matmul(), residual())),
        (Residual, ignores_the_stride, (activation("relu"), residual())),
    ],
)
def test_a_wrong_rule_is_caught_before_the_first_use(rule, wrong, chain, fresh, monkeypatch):
    monkeypatch.setattr(rule, "emit", wrong)
    op = fuse(*chain)
    args = draw(op, {"rows": 1, "columns": 32})

    for _ in range(2):  # nor is it used later
        with pytest.raises(OpCheckError, match="from its reference"):
            op(*args)


def test_an_op_is_checked_once(fresh, monkeypatch):
    op = fuse(norm(1e-6), residual())
    args = draw(op, {"rows": 2, "columns": 8})
    op(*args)

    monkeypatch.setattr(registry.Op, "check", lambda *_: pytest.fail("checked again"))
    op(*args)


@dataclass(frozen=True)
class Scale(Step):
    """A rule of one's own: multiply by a constant."""

    factor: float

    def reference(self, value, *tensor):
        return value * self.factor

    def emit(self, name):
        return [f"value = value * {self.factor!r}"]


def test_a_step_of_ones_own_joins_the_others():
    op = fuse(matmul(), Scale(0.25), bias())
    args = draw(op, {"rows": 3, "columns": 24})

    GENERATED[torch.float32].check(op(*args), F.linear(args[0], args[1]) / 4 + args[2])


# What it refuses


@pytest.mark.parametrize(
    ("chain", "why"),
    [
        ((), "one step or more"),
        (("silu",), "one step or more"),
        ((matmul(), activation("silu"), matmul()), "two products"),
        ((matmul(), norm(1e-6)), "norm after a product"),
        ((norm(1e-6), activation("silu"), matmul()), "directly before"),
        ((norm(1e-6), norm(1e-6), matmul()), "directly before"),
        ((quantise("int8"), matmul()), "must be the last"),
        ((quantise("int8"), bias()), "must be the last"),
    ],
)
def test_a_chain_that_is_no_single_kernel_is_refused_with_the_reason(chain, why):
    with pytest.raises(UnsupportedChain, match=why):
        fuse(*chain)


@pytest.mark.parametrize(
    "make", [lambda: activation("tanh"), lambda: quantise("int4"), lambda: quantise("int8", "col")]
)
def test_an_unknown_kind_is_refused(make):
    with pytest.raises(ValueError, match="use"):
        make()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda x, weight, added: (x, weight), "got 1 tensors"),
        (lambda x, weight, added: (x, weight, added[:-1]), "residual must be"),
        (lambda x, weight, added: (x, weight[:, :-1], added), "weight must be"),
        (lambda x, weight, added: (x, weight.half(), added), "weight must be"),
        (lambda x, weight, added: (x.T.contiguous().T, weight, added), "contiguous rows"),
        (lambda x, weight, added: (x, weight.T.contiguous().T, added), "contiguous rows"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change, why):
    op = fuse(matmul(), residual())

    with pytest.raises(ValueError, match=why):
        op(*change(*draw(op, {"rows": 4, "columns": 24})))


def test_a_row_that_fits_no_program_is_refused_with_the_fallback():
    x = torch.zeros(1, 20000, device=DEVICE)

    with pytest.raises(ValueError, match=r"20000 columns.*reference"):
        fuse(norm(1e-6))(x, x[0])


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU has bfloat16")
def test_bfloat16_in_the_interpreter_is_refused_with_the_fallback():
    op = fuse(*NORM_GEMM_SILU)

    with pytest.raises(ValueError, match=r"bfloat16.*reference"):
        op(*draw(op, {"rows": 1, "columns": 16}, torch.bfloat16))


# What it saves


def test_bytes_of_norm_product_activation_counted_by_hand():
    moved = fuse(*NORM_GEMM_SILU).bytes({"rows": 10, "inner": 100, "columns": 300}, torch.bfloat16)

    x, normed, norm_weight, weight, out = 2000, 2000, 200, 60000, 6000
    assert moved.fused_bytes == x + norm_weight + weight + out
    assert moved.composed_bytes == (x + norm_weight + normed) + (normed + weight + out) + (out + out)
    assert moved.saved_bytes == 2 * normed + 2 * out


def test_bytes_of_a_quantised_chain_without_product_counted_by_hand():
    moved = fuse(residual(), bias(), quantise("int8", per="row")).bytes({"rows": 8, "columns": 64}, torch.float32)

    value, bias_bytes, scales, out = 2048, 256, 32, 512
    assert moved.fused_bytes == value + value + bias_bytes + scales + out
    assert moved.composed_bytes == 3 * value + (2 * value + bias_bytes) + (value + scales + out)


def test_one_step_alone_saves_nothing():
    assert fuse(matmul()).bytes({"rows": 3, "inner": 5, "columns": 7}).saved_bytes == 0


def test_the_report_has_a_line_for_each_shape(capsys):
    fuse(*NORM_GEMM_SILU).report(
        {"rows": 1, "inner": 1024, "columns": 6144}, {"rows": 16384, "inner": 1024, "columns": 6144}
    )

    _, _, small, large = capsys.readouterr().out.splitlines()
    assert small.split()[:3] == ["12.60", "12.63", "0%"]  # at one row the weight is all there is
    assert large.split()[:3] == ["247.47", "717.23", "65%"]


# Without and with a GPU

COMPILE = """
from minisgl_kernels.fuser import activation, fuse, matmul, norm
from minisgl_kernels.triton.cases import CompileCase
from minisgl_kernels.triton.compile import compile_case

kernel = fuse(norm(1e-6), matmul(), activation("silu")).kernel
types = {name: "*fp16" if name.endswith("_ptr") else "i32" for name in kernel.arg_names if "BLOCK" not in name}
case = CompileCase(kernel, types, {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 128})
for sm in (75, 80, 90):
    assert compile_case(case, sm).asm["cubin"], sm
"""


def test_the_worked_example_compiles_without_a_gpu(tmp_path):
    environment = {**os.environ, "MINISGL_HOME": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    environment.pop("TRITON_INTERPRET", None)
    environment["PYTHONPATH"] = str(Path(minisgl_kernels.__file__).parents[1])

    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


@needs_gpu
@pytest.mark.parametrize("rows", [1, 16, 64, 200, 4099])
def test_a_large_product_in_bfloat16(rows):
    op = fuse(*NORM_GEMM_SILU)
    shape = {"rows": rows, "inner": 1024, "columns": 3072}
    args = op.random_inputs(shape, DEVICE, torch.bfloat16, torch.Generator(DEVICE).manual_seed(3))

    out = op(*args)

    GENERATED[torch.bfloat16].check(out.double(), op.reference(*(arg.double() for arg in args)).double())


@needs_gpu
@pytest.mark.parametrize("chain", [NORM_GEMM_SILU, (norm(1e-6), residual())], ids=names)
def test_a_launch_can_be_captured_in_a_graph(chain):
    op = fuse(*chain)
    args = draw(op, {"rows": 16, "columns": 64}, torch.bfloat16)
    expected = op(*args)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(*args)
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, expected)


@needs_gpu
@needs_fp8
def test_a_nan_becomes_a_nan_of_fp8():
    x = torch.tensor([[torch.nan, -torch.nan, 1.0]], device=DEVICE)

    out = fuse(activation("relu"), quantise("fp8"))(x, torch.ones(1, device=DEVICE))

    assert out.float().isnan().tolist() == [[True, True, False]]
