"""The C++ kernels against float64, at awkward sizes; and their compilation, with and without a compiler."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import minisgl_kernels
import pytest
import torch
import torch.nn.functional as F
from minisgl_kernels import cpu, reference
from minisgl_kernels.cpu import build as builder

KERNELS = Path(minisgl_kernels.__file__).parents[1]
DTYPES = [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)]
ULP = {torch.float32: 1e-5, torch.bfloat16: 2**-8}  # fp32: hundreds of sums in another order; bf16: one rounding


@pytest.fixture(autouse=True)
def torch_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def compiled():
    if not cpu.available():
        pytest.skip(cpu.why_unavailable())


@pytest.fixture
def no_torch_product(monkeypatch):
    """Fails a test in which the kernels hand the work back to torch, which they may for speed alone."""
    monkeypatch.setattr(cpu, "max_rows", lambda *_: 2**62)
    monkeypatch.setattr(cpu, "_torch_linear", lambda *_: pytest.fail("torch computed this"))


@pytest.fixture
def forget_library():
    """The library is looked for again, in the test and after it."""
    caches = (cpu._library, cpu._kernels)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("MINISGL_HOME", str(tmp_path))
    return tmp_path


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def problem(rows, k, n, dtypes=DTYPES[0], bias=True):
    x_dtype, weight_dtype = dtypes
    x, weight = random(rows, k, dtype=x_dtype), random(n, k, dtype=weight_dtype, seed=1)
    return x, weight, random(n, dtype=weight_dtype, seed=2) if bias else None


def check(y, x, weight, bias):
    assert y.dtype == x.dtype
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(y.double(), exact, atol=1e-4, rtol=ULP[x.dtype])


@pytest.mark.usefixtures("compiled", "no_torch_product")
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9, 17, 33, 61])
def test_linear_is_the_matrix_product_at_any_size(rows, dtypes, bias):
    for k in (1, 7, 63, 64, 577):
        for n in (1, 3, 97):
            x, weight, b = problem(rows, k, n, dtypes, bias)

            check(cpu.linear(x, weight, b), x, weight, b)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 7])
def test_norm_rotation_and_activation_are_the_references(rows, dtype):
    close = {"atol": 0.05, "rtol": 0.02} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-5}  # one rounding
    generator = torch.Generator().manual_seed(rows)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    for width in (1, 10, 36, 576, 577):
        x, weight, gate_up = random(rows, width), random(width), 10 * random(rows, 2 * width)
        torch.testing.assert_close(cpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), **close)
        torch.testing.assert_close(cpu.silu_and_mul(gate_up), reference.silu_and_mul(gate_up), **close)
    part, cos, sin = random(rows, 9, 10)[:, :7], random(rows, 5), random(rows, 5)
    torch.testing.assert_close(cpu.apply_rope(part, cos, sin), reference.apply_rope(part, cos, sin), **close)


@pytest.mark.usefixtures("compiled")
def test_a_nan_passes_through_norm_and_activation():
    x = torch.ones(2, 40)
    x[1, 3] = float("nan")

    assert cpu.rms_norm(x, torch.ones(40), 1e-5).isnan().any(dim=1).tolist() == [False, True]
    assert cpu.silu_and_mul(x).isnan().any(dim=1).tolist() == [False, True]


@pytest.mark.usefixtures("compiled")
def test_linear_of_many_rows_is_the_matrix_product():
    x, weight, bias = problem(200, 577, 97, DTYPES[1])

    check(cpu.linear(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("shape", [(0, 8), (8,), (2, 3, 8), (2, 0, 8)])
def test_linear_keeps_the_leading_dimensions(shape):
    x, weight = random(*shape), random(5, 8)

    y = cpu.linear(x, weight)

    assert y.shape == (*shape[:-1], 5)
    check(y, x, weight, None)


@pytest.mark.usefixtures("compiled", "no_torch_product")
def test_linear_takes_rows_that_are_not_contiguous():
    x, weight = random(64, 5).T, random(3, 64)

    check(cpu.linear(x, weight), x, weight, None)


@pytest.mark.usefixtures("compiled", "no_torch_product")
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("column", [0, 63, 64])  # within the last step, and in what is left of the row
def test_a_nan_reaches_its_row_and_no_other(dtypes, column):
    x, weight, bias = problem(9, 65, 7, dtypes)
    x[4, column] = float("nan")

    y = cpu.linear(x, weight, bias)

    assert y[4].isnan().all()
    assert y[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()


@pytest.mark.usefixtures("compiled", "no_torch_product")
def test_a_nan_weight_reaches_its_output_and_no_other():
    x, weight, _ = problem(3, 65, 7, DTYPES[2])
    weight[2, 0] = float("nan")  # right behind the last element of row 1

    y = cpu.linear(x, weight)

    assert y[:, 2].isnan().all()
    assert y[:, [0, 1, 3, 4, 5, 6]].isfinite().all()


@pytest.mark.usefixtures("compiled", "no_torch_product")
def test_bf16_rounds_to_nearest_even():
    x = torch.tensor([[1.0]], dtype=torch.bfloat16)
    bias = torch.tensor([2.0**-8, 3 * 2.0**-8, 2.0**-8 + 2.0**-15, float("inf")], dtype=torch.bfloat16)

    y = cpu.linear(x, torch.ones(4, 1, dtype=torch.bfloat16), bias)

    torch.testing.assert_close(y, (1 + bias.float()).bfloat16()[None], atol=0, rtol=0)


@pytest.mark.usefixtures("compiled", "no_torch_product")
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("k", [64, 577])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(dtypes, k):
    x, weight, bias = problem(64, k, 97, dtypes)
    alone = torch.cat([cpu.linear(row[None], weight, bias) for row in x])

    for rows in (2, 5, 6, 7, 8, 13, 32, 61, 64):
        assert torch.equal(cpu.linear(x[:rows], weight, bias), alone[:rows])


@pytest.mark.usefixtures("compiled", "no_torch_product")
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_the_number_of_threads_changes_no_bit(dtypes):
    x, weight, bias = problem(9, 577, 97, dtypes)
    torch.set_num_threads(1)
    one = cpu.linear(x, weight, bias)
    torch.set_num_threads(2)

    assert torch.equal(cpu.linear(x, weight, bias), one)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("x", "weight", "bias"),
    [
        (random(2, 8, dtype=torch.float16), random(3, 8, dtype=torch.float16), None),
        (random(2, 8).double(), random(3, 8).double(), None),
        (random(2, 8), random(8, 3).T, None),
        (random(2, 8).requires_grad_(), random(3, 8), None),
        (random(2, 8), random(3, 8), random(1)),
    ],
    ids=["float16", "float64", "strided weights", "gradient", "broadcast bias"],
)
def test_what_the_kernels_cannot_is_left_to_torch(x, weight, bias):
    assert torch.equal(cpu.linear(x, weight, bias), F.linear(x, weight, bias))


@pytest.mark.parametrize(
    ("x", "weight", "bias"),
    [
        (random(2, 7), random(3, 8), None),
        (random(2, 8), random(3, 8), random(4)),
        (random(2, 8, dtype=torch.bfloat16), random(3, 8), None),
    ],
    ids=["in_features", "bias", "dtypes"],
)
def test_what_does_not_fit_is_an_error_as_with_torch(x, weight, bias):
    with pytest.raises(RuntimeError):
        cpu.linear(x, weight, bias)


@pytest.mark.usefixtures("compiled", "home")
@pytest.mark.parametrize("vector_bytes", [16, 64])
def test_results_are_right_at_any_width_of_vectors(vector_bytes, monkeypatch, forget_library):
    path = builder.build_library((f"-DVECTOR_BYTES={vector_bytes}", "-O0", "-Wno-psabi"))
    monkeypatch.setattr(cpu, "_library", lambda: cpu.load(path))

    for dtypes in DTYPES:
        for k in (7, 64, 577):
            x, weight, bias = problem(17, k, 7, dtypes)
            check(cpu.linear(x, weight, bias), x, weight, bias)
        paged = Paged(new=[1, 9], total=[70, 9], dtypes=dtypes)
        paged.check(paged.attend())


@pytest.mark.usefixtures("compiled")
def test_each_thread_that_torch_allows_computes_its_share(forget_library):
    started = []
    thread = 0

    @ctypes.CFUNCTYPE(None, ctypes.CFUNCTYPE(None, ctypes.c_void_p), ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    def parallel(run, task, threads, _):
        nonlocal thread
        started.append(threads)
        for thread in range(threads):  # noqa: B007, one after the other
            run(task)

    thread_num = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: thread)
    num_threads = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: started[-1])
    cpu._library().use_runtime(parallel, thread_num, num_threads)
    torch.set_num_threads(3)
    x, weight, bias = problem(5, 577, 97)

    y = cpu.linear(x, weight, bias)

    assert started == [3]
    check(y, x, weight, bias)


@pytest.mark.usefixtures("compiled")
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of loaded libraries")
def test_the_threads_are_those_that_torch_has_started():
    cpu.linear(*problem(8, 577, 97))

    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    runtimes = {path for path in mapped if Path(path).name.startswith(("libgomp", "libomp", "libiomp"))}
    assert len(runtimes) == 1
    assert cpu._torch_runtime() is not None


# ---- Attention


class Paged:
    """Sequences whose `new` last of `total` tokens are queries, on shuffled pages. NaN is whatever nobody holds."""

    def __init__(self, new, total, page_size=4, heads=(6, 2), head_dim=16, dtypes=DTYPES[0], seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.new, self.total, self.page_size, self.scale = new, total, page_size, head_dim**-0.5
        self.group = heads[0] // heads[1]
        counts = [-(-n // page_size) for n in total]
        order = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
        self.page_table = torch.full((len(total), max(counts) + 1), 0)  # nobody holds page 0
        slots = (sum(counts) + 1) * page_size
        self.kv = torch.full((slots, 2, heads[1], head_dim), float("nan"), dtype=dtypes[1])
        self.slots = []
        for i, (count, length) in enumerate(zip(counts, total, strict=True)):
            pages = torch.tensor([order.pop() for _ in range(count)])
            self.page_table[i, :count] = pages
            self.slots.append((pages[:, None] * page_size + torch.arange(page_size)).flatten()[:length])
            self.kv[self.slots[-1]] = torch.randn(length, 2, heads[1], head_dim, generator=generator).to(dtypes[1])
        self.q = torch.randn(sum(new), heads[0], head_dim, generator=generator).to(dtypes[0])
        self.starts = torch.tensor([0, *new]).cumsum(0)

    def attend(self, q=None):
        q = self.q if q is None else q
        lengths = torch.tensor(self.total)
        values, keys = self.kv.unbind(1)  # neither is contiguous
        return cpu.paged_attention(q, keys, values, self.page_table, self.page_size, lengths, self.starts, self.scale)

    def check(self, out, tolerance=None):
        tolerance = tolerance or ULP[self.q.dtype]
        assert out.dtype == self.q.dtype
        exact = torch.cat([self.exact(i) for i in range(len(self.new))])
        torch.testing.assert_close(out.double(), exact, atol=tolerance, rtol=tolerance)

    def exact(self, i):
        """Sequence i in float64, a query at a time."""
        values, keys = self.kv[self.slots[i]].double().repeat_interleave(self.group, dim=2).unbind(1)
        rows = []
        for n in range(self.new[i]):
            seen = self.total[i] - self.new[i] + n + 1
            scores = torch.einsum("hd,shd->hs", self.q[self.starts[i] + n].double(), keys[:seen]) * self.scale
            rows.append(torch.einsum("hs,shd->hd", scores.softmax(-1), values[:seen]))
        return torch.stack(rows) if rows else torch.empty(0, *self.q.shape[1:], dtype=torch.float64)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(("heads", "head_dim"), [((9, 3), 64), ((4, 4), 8), ((7, 1), 20), ((2, 1), 80)])
def test_attention_over_pages_is_attention(heads, head_dim, page_size, dtypes):
    new, total = [1, 1, 70, 0, 1, 3, 5], [1, 65, 130, 7, 64, 66, 5]
    paged = Paged(new, total, page_size, heads, head_dim, dtypes)

    paged.check(paged.attend())


@pytest.mark.usefixtures("compiled")
def test_attention_takes_queries_that_are_a_part_of_wider_rows():
    paged = Paged([1, 3], [5, 3])
    wide = torch.cat([paged.q, torch.full_like(paged.q, float("nan"))], dim=1)

    paged.check(paged.attend(wide[:, : paged.q.shape[1]]))


@pytest.mark.usefixtures("compiled")
def test_attention_survives_scores_whose_exponentials_do_not_fit_an_fp32():
    paged = Paged([1, 4], [130, 70])
    paged.q *= 1000

    paged.check(paged.attend(), tolerance=1e-3)  # an fp32 of a few thousand is off by 1e-4, and so is its exponential


@pytest.mark.usefixtures("compiled")
def test_a_nan_among_the_keys_reaches_all_who_see_it_and_nobody_before():
    paged = Paged([8], [8], heads=(1, 1))
    paged.kv[paged.slots[0][5], 1] = float("nan")

    out = paged.attend()

    assert out[:5].isfinite().all()
    assert out[5:].isnan().all()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("page_size", [1, 16])
def test_attention_of_a_token_has_the_same_bits_in_any_batch_chunk_and_page_size(page_size):
    whole = Paged([150], [150], page_size=4)
    expected = whole.attend()

    for new in (1, 2, 7, 149):
        part = Paged([1, new], [9, 150], page_size=page_size, seed=1)
        part.kv[part.slots[1]] = whole.kv[whole.slots[0]]
        part.q[1:] = whole.q[150 - new :]
        assert torch.equal(part.attend()[1:], expected[150 - new :])


@pytest.mark.usefixtures("compiled")
def test_the_number_of_threads_changes_no_bit_of_attention():
    paged = Paged([1, 70, 3], [200, 70, 65])
    torch.set_num_threads(1)
    one = paged.attend()
    torch.set_num_threads(2)

    assert torch.equal(paged.attend(), one)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 6, 16, dtype=torch.float16)}, "no C\\+\\+ attention for q of torch.float16"),
        ({"q": torch.zeros(1, 5, 16)}, "do not fit"),
        ({"values": torch.zeros(4, 2, 8)}, "do not fit"),
        ({"keys": torch.zeros(4, 16, 2).transpose(1, 2)}, "contiguous in head_dim"),
        ({"kv_lens": torch.tensor([1, 1])}, "1 rows of pages"),
        ({"page_table": torch.zeros(1, 1, dtype=torch.int32)}, "int64"),
    ],
    ids=["dtype", "heads", "head_dim", "layout", "rows", "int32"],
)
def test_what_attention_cannot_is_an_error(change, message):
    arguments = {
        "q": torch.zeros(1, 6, 16),
        "keys": torch.zeros(4, 2, 16),
        "values": torch.zeros(4, 2, 16),
        "page_table": torch.zeros(1, 1, dtype=torch.int64),
        "page_size": 4,
        "kv_lens": torch.tensor([1]),
        "query_starts": torch.tensor([0, 1]),
        "scale": 1.0,
    }

    with pytest.raises(ValueError, match=message):
        cpu.paged_attention(**arguments | change)


@pytest.mark.usefixtures("home", "forget_library")
def test_attention_without_a_compiler_is_an_error_with_the_reason(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-c++")

    with pytest.raises(RuntimeError, match="no-such-c"):
        Paged([1], [1]).attend()


# ---- Compiling


@pytest.mark.usefixtures("home", "forget_library")
@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"PATH": "", "CXX": ""}, "no C++ compiler"),
        ({"CXX": "no-such-c++ -O2"}, "CXX=no-such-c++ -O2 is not installed"),
    ],
    ids=["no compiler", "CXX names none"],
)
def test_without_a_compiler_torch_computes_and_the_reason_is_known(variables, reason, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    x, weight, bias = problem(2, 8, 3)

    y = cpu.linear(x, weight, bias)

    assert not cpu.available()
    assert reason in cpu.why_unavailable()
    assert torch.equal(y, F.linear(x, weight, bias))


@pytest.mark.usefixtures("home", "forget_library")
def test_bf16_weights_serve_an_fp32_input_without_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-c++")
    x, weight, bias = problem(2, 8, 3, DTYPES[1])

    check(cpu.linear(x, weight, bias), x, weight, bias)


@pytest.mark.usefixtures("compiled", "forget_library")
def test_a_compiler_error_is_the_reason_and_leaves_no_file(home, monkeypatch, tmp_path_factory):
    broken = tmp_path_factory.mktemp("source") / "kernels.cpp"
    broken.write_text("int missing_semicolon")
    monkeypatch.setattr(builder, "SOURCE", broken)

    assert "missing_semicolon" in cpu.why_unavailable()
    assert list((home / "kernels").glob("*")) == []


@pytest.mark.usefixtures("compiled", "forget_library")
def test_a_folder_that_cannot_be_written_is_a_reason(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("MINISGL_HOME", str(file))

    assert str(file) in cpu.why_unavailable()


@pytest.fixture
def counting_compiler(tmp_path_factory, monkeypatch):
    """A compiler that notes its runs in a file and copies the source instead of compiling it."""
    folder = tmp_path_factory.mktemp("compiler")
    script = folder / "c++"
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && { echo "${VERSION:-1}"; exit; }\n'
        f"echo run >> {folder / 'runs'}\n"
        'while [ "$1" != -o ]; do source=$1; shift; done\ncp "$source" "$2"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return folder / "runs"


def test_a_built_library_is_built_only_once(home, counting_compiler):
    first = builder.build_library()

    assert builder.build_library() == first
    assert counting_compiler.read_text() == "run\n"


@pytest.mark.parametrize("change", ["source", "compiler", "processor", "flags"])
def test_another_source_compiler_or_processor_is_another_library(
    change, home, counting_compiler, monkeypatch, tmp_path
):
    first = builder.build_library()
    if change == "source":
        (tmp_path / "other.cpp").write_text(builder.SOURCE.read_text() + "//")
        monkeypatch.setattr(builder, "SOURCE", tmp_path / "other.cpp")
    if change == "compiler":
        monkeypatch.setenv("VERSION", "2")
    if change == "processor":
        monkeypatch.setattr(builder, "_cpu_facts", lambda: "another")

    assert builder.build_library(("-O1",) if change == "flags" else ()) != first


@pytest.mark.usefixtures("compiled")
def test_two_processes_build_at_once(tmp_path):
    script = (
        "import torch\nfrom minisgl_kernels import cpu\ncpu.build.FLAGS += ('-O0',)\n"
        "ones = torch.ones(1, 64)\nprint(cpu.available(), cpu.linear(ones, ones))"
    )
    search = os.pathsep.join([str(KERNELS), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"MINISGL_HOME": str(tmp_path), "PYTHONPATH": search}
    processes = [
        subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]

    assert [process.communicate()[0] for process in processes] == ["True tensor([[64.]])\n"] * 2
    assert len(list((tmp_path / "kernels").iterdir())) == 1
