"""The engine on each attention backend and implementation of ops: the bare loop's tokens, or a refusal with a reason.

Triton's kernels run in the interpreter where there is no GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import get_args, get_type_hints

import minisgl_kernels as ops
import pytest
import torch
from minisgl_kernels import reference

from minisgl.attention import BACKENDS, backend, needs_lengths
from minisgl.attention.in_place import InPlaceAttention
from minisgl.config import EngineConfig
from minisgl.core import SamplingParams, WorkCounts
from minisgl.engine.engine import Engine
from minisgl.layers.attention import Attention, FusedAttention
from minisgl.models.register import build_model
from minisgl.models.weight import load_weights
from minisgl.simple import naive_generate
from tests.helpers import check_whole, hf_state, request, serve, tiny_model
from tests.tolerances import TINY_LOGITS

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DEVICE = CUDA if torch.cuda.is_available() else CPU
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
PROMPTS = [[3, 99, 14, 15, 92, 65, 35], [3, 99, 14, 15, 92, 65, 36, 1], [5] * 21, [120]]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture
def triton_runs(monkeypatch):
    if reason := ops.why_not("triton", DEVICE, FP32):
        pytest.skip(reason)
    if DEVICE == CPU:  # a small batch has 64 splits, and the interpreter takes a millisecond for an empty one, too
        monkeypatch.setattr("minisgl_kernels.triton.decode.launch_for", lambda programs, row_bytes: (2, 16, 2, 2))


def greedy(model, prompt, n):
    return list(naive_generate(model, prompt, SamplingParams(max_tokens=n, ignore_eos=True)))


def twin(model, kernels="triton", attention=FusedAttention, dtype=FP32, device=DEVICE):
    """The same model with other ops."""
    copy = build_model(model.config, ops.implementation(kernels), attention)
    load_weights(copy, hf_state(model).items(), device, dtype)
    return copy


def engine_on(model, attention="triton", kernels="triton", **config):
    """An engine without graphs and overlap, whose pool is NaN, and whose pages come in reverse order."""
    config = {"kv_pages": 40, "page_size": 4, "graphs": "off", "overlap": "off"} | config
    engine = Engine(model, EngineConfig(**config, attention=attention, kernels=kernels))
    engine.pool.kv[:, :, 1:] = float("nan")
    engine.pages._free.reverse()
    return engine


# Whole runs in Triton: few tokens, since the interpreter is slow.


@pytest.mark.usefixtures("triton_runs")
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])  # without norms of q and k, and with
@pytest.mark.parametrize("layer", [Attention, FusedAttention])
def test_a_ragged_batch_in_triton_gets_the_bare_loops_greedy_tokens(architecture, layer):
    model = tiny_model(architecture)
    engine = engine_on(twin(model, attention=layer))
    requests = serve(engine, *(request(i, p, max_tokens=4) for i, p in enumerate(PROMPTS)))

    assert [r.output for r in requests] == [greedy(model, p, 4) for p in PROMPTS]


@pytest.mark.usefixtures("triton_runs")
def test_triton_attention_goes_with_the_layers_ops_of_torch(model):
    engine = engine_on(twin(model, "torch", Attention), kernels="torch")
    requests = serve(engine, *(request(i, p, max_tokens=3) for i, p in enumerate(PROMPTS)))

    assert [r.output for r in requests] == [greedy(model, p, 3) for p in PROMPTS]


@pytest.mark.usefixtures("triton_runs")
def test_the_layers_ops_of_triton_go_with_attention_in_torch(model):
    engine = engine_on(twin(model, attention=Attention), attention="torch")
    requests = serve(engine, *(request(i, p, max_tokens=3) for i, p in enumerate(PROMPTS)))

    assert [r.output for r in requests] == [greedy(model, p, 3) for p in PROMPTS]


@pytest.mark.usefixtures("triton_runs")
def test_chunks_beside_decodes_and_preemption_in_triton(model):
    switches = {"kv_pages": 10, "max_batch_tokens": 6, "output_reserve": 0.0}
    engine = engine_on(twin(model), **switches)
    requests = serve(engine, *(request(i, p, max_tokens=6) for i, p in enumerate(PROMPTS)))

    assert engine.work.preemptions > 0
    assert [r.output for r in requests] == [greedy(model, p, 6) for p in PROMPTS]
    check_whole(engine.scheduler)


@pytest.mark.usefixtures("triton_runs")
def test_a_prefix_hit_in_triton(model):
    engine = engine_on(twin(model))
    serve(engine, request(0, PROMPTS[0], max_tokens=2))
    hits = serve(engine, request(1, PROMPTS[0], max_tokens=3), request(2, [*PROMPTS[0][:6], 1], max_tokens=3))

    assert [r.num_cached for r in hits] == [4, 4]
    assert [r.output for r in hits] == [greedy(model, r.tokens[: r.prompt_len], 3) for r in hits]


@pytest.mark.usefixtures("triton_runs")
@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_the_page_size_does_not_change_the_tokens_of_triton(model, page_size):
    engine = engine_on(twin(model), page_size=page_size, kv_pages=50)
    requests = serve(engine, *(request(i, p, max_tokens=3) for i, p in enumerate(PROMPTS[:2])))

    assert [r.output for r in requests] == [greedy(model, p, 3) for p in PROMPTS[:2]]


@pytest.mark.usefixtures("triton_runs")
def test_16_bits_in_triton_stay_close_to_fp32s_first_choice(model):
    engine = engine_on(twin(model, dtype=FP16))
    requests = serve(engine, *(request(i, p, max_tokens=2, logprobs=5) for i, p in enumerate(PROMPTS)))

    assert engine.pool.kv.dtype == FP16
    for r, prompt in zip(requests, PROMPTS, strict=True):
        assert greedy(model, prompt, 1)[0] in r.logprobs[0].top


# One batch.


class ReferenceAttention(InPlaceAttention):
    """Attention in place by the definition, on any device and in any dtype."""

    def attend(self, q, layer):
        return reference.paged_attention(q, *self.paged(layer), q.shape[-1] ** -0.5)


def one_step(model, attention):
    """Prefill PROMPTS in one step: logits [4, vocab], the engine after it."""
    engine = engine_on(model, attention="torch", kernels="torch")
    engine.runner.attention = attention
    logits = []
    hook = model.register_forward_hook(lambda _, __, out: logits.append(out.cpu()))
    for i, prompt in enumerate(PROMPTS):
        engine.add(request(i, prompt, max_tokens=9))
    engine.step()
    hook.remove()
    return logits[0], engine


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_fused_attention_is_attention(architecture, kernels, request):
    if kernels == "triton":
        request.getfixturevalue("triton_runs")
    model = tiny_model(architecture)
    plain, plain_engine = one_step(twin(model, "torch", Attention), ReferenceAttention)
    fused, fused_engine = one_step(twin(model, kernels, FusedAttention), ReferenceAttention)

    TINY_LOGITS.check(fused, plain)
    stored, expected = fused_engine.pool.kv, plain_engine.pool.kv
    assert torch.equal(stored.isnan(), expected.isnan())
    TINY_LOGITS.check(stored.nan_to_num(), expected.nan_to_num())
    assert fused_engine.work == plain_engine.work


def test_backends_that_read_in_place_count_the_bytes_of_the_sequences_and_torch_those_of_its_padding(model):
    _, in_place = one_step(twin(model, "torch", Attention), ReferenceAttention)
    _, torchs = one_step(twin(model, "torch", Attention), backend("torch"))
    token_bytes = 2 * 2 * 2 * 10 * 4  # layers, K and V, heads, head_dim, bytes

    assert in_place.work.kv_bytes_written == torchs.work.kv_bytes_written == 37 * token_bytes
    assert in_place.work.kv_bytes_read == 37 * token_bytes
    assert torchs.work.kv_bytes_read >= in_place.work.kv_bytes_read


@pytest.mark.parametrize("name", ["cpp", "triton"])
def test_every_backend_counts_the_same_bytes_for_one_sequence(model, name):
    if reason := ops.why_not(name, DEVICE, FP32):
        pytest.skip(reason)
    work = []
    for attention in ("torch", name):
        engine = engine_on(twin(model, "torch", Attention), attention, "torch")
        serve(engine, request(0, PROMPTS[2], max_tokens=3))
        work.append(engine.work)

    assert work[0] == work[1]
    assert work[0].kv_bytes_read > 0


def arguments_of_attention(model):
    """What a step's attention is made from, by name."""
    given = {}

    def noted(pool, rows, work):
        given.update(pool=pool, rows=rows, work=work)
        return ReferenceAttention(pool, rows, work)

    one_step(twin(model, "torch", Attention), noted)
    return given


def test_the_work_counts_of_a_backend_may_be_left_out(model):
    given = arguments_of_attention(model)

    assert ReferenceAttention(given["pool"], given["rows"]).work == WorkCounts()


def test_page_tables_are_as_wide_as_the_longest_sequence_of_the_step_needs(model):
    given = arguments_of_attention(model)

    assert max(given["rows"].kv_lens) == 21
    assert given["rows"].page_table.shape == (4, 6)


# The flash-attn package, whose place a stand-in takes.


@pytest.fixture
def stand_in_for_flash_attn(monkeypatch):
    """A module `flash_attn` that checks what it is given as the package would, and computes by the definition."""
    calls = []

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, causal, block_table):
        for table in (cu_seqlens_q, cu_seqlens_k, block_table):
            assert table.dtype == torch.int32
            assert table.is_contiguous()
        assert k.shape == v.shape
        assert k.shape[1:] == (256, 2, q.shape[2])  # pages of [page_size, kv_heads, head_dim]
        assert causal
        queries, lens = cu_seqlens_q.diff(), cu_seqlens_k.diff()
        assert (cu_seqlens_q[0], cu_seqlens_k[0]) == (0, 0)
        assert (max_seqlen_q, max_seqlen_k) == (queries.max(), lens.max())
        calls.append((queries.tolist(), lens.tolist()))
        rows = (block_table.long(), 256, lens.long(), cu_seqlens_q.long())
        return reference.paged_attention(q, k.flatten(0, 1), v.flatten(0, 1), *rows, q.shape[2] ** -0.5)

    module = types.ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setitem(sys.modules, "minisgl.attention.flash_attn", None)  # restored to what it was
    del sys.modules["minisgl.attention.flash_attn"]
    return calls


def test_flash_attn_gets_what_it_wants_as_a_stand_in_for_it_sees(model, stand_in_for_flash_attn):
    copy = twin(model, "torch", FusedAttention, device=CPU)
    engine = engine_on(copy, "torch", "torch", page_size=256, kv_pages=9, max_batch_tokens=16)
    engine.runner.attention = backend("flash_attn")
    requests = serve(engine, *(request(i, p, max_tokens=4) for i, p in enumerate(PROMPTS)))

    assert [r.output for r in requests] == [greedy(model, p, 4) for p in PROMPTS]
    assert stand_in_for_flash_attn[0] == ([7, 8, 1], [7, 8, 1])  # a chunk of one token among them
    assert len(stand_in_for_flash_attn) == engine.work.steps * model.config.num_layers


@pytest.mark.parametrize("page_size", [1, 16, 128, 257])
def test_pages_that_flash_attn_does_not_take_are_refused_when_the_config_is_made(page_size):
    with pytest.raises(ValueError, match=rf"page_size is {page_size}.* a multiple of 256 for attention=flash_attn"):
        EngineConfig(attention="flash_attn", page_size=page_size)


def test_flash_attn_takes_pages_of_256_tokens():
    assert EngineConfig(attention="flash_attn", page_size=512).attention == "flash_attn"


# The choice.


@pytest.fixture
def pretend(monkeypatch):
    """Make this process look like one on a machine with a GPU of this capability, and with these packages."""

    def change(capability, packages=("triton", "cuda.core", "flash_attn")):
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
        monkeypatch.setattr(ops, "_installed", lambda package: package in packages)

    if ops._installed("triton"):
        import minisgl_kernels.triton  # noqa: F401  with TRITON_INTERPRET as it is, for the tests to come
    else:
        pytest.skip("Triton is not installed")
    return change


@pytest.mark.parametrize(
    ("capability", "dtype", "chosen"),
    [
        ((9, 0), BF16, "triton"),
        ((9, 0), FP32, "triton"),
        ((9, 0), torch.float64, "torch"),
        ((7, 5), FP16, "triton"),
        ((7, 5), BF16, "torch"),
        ((7, 0), FP16, "torch"),
    ],
    ids=str,
)
def test_auto_takes_triton_on_a_gpu_that_runs_it(pretend, capability, dtype, chosen):
    pretend(capability)

    assert ops.choose("auto", CUDA, dtype) == chosen


def test_auto_takes_torch_on_a_gpu_without_triton(pretend):
    pretend((9, 0), packages=())

    assert ops.choose("auto", CUDA, BF16) == "torch"


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_auto_on_a_cpu_takes_cpp_where_it_runs_and_never_the_interpreter(dtype):
    assert ops.choose("auto", CPU, dtype) == ("torch" if ops.why_not("cpp", CPU, dtype) else "cpp")


def test_auto_elsewhere_takes_torch():
    assert ops.choose("auto", torch.device("mps"), FP16) == "torch"


@pytest.mark.parametrize(
    ("choice", "capability", "packages", "device", "dtype", "message"),
    [
        ("triton", (7, 0), ["triton"], CUDA, FP16, "it needs a GPU of sm_75 or newer, and this is sm_70; torch can"),
        ("triton", (7, 5), ["triton"], CUDA, BF16, "this GPU has no bfloat16: choose --dtype float16; torch can"),
        ("triton", (9, 0), [], CUDA, BF16, "the package triton is not installed; torch can"),
        ("cuda", (9, 0), ["triton"], CUDA, BF16, "the package cuda-core is not installed; triton can"),
        ("cuda", (7, 0), ["cuda.core", "triton"], CUDA, FP16, r"needs compute capability 7.5, .* torch can"),
        ("cuda", (9, 0), ["cuda.core", "triton"], CPU, FP16, r"it is for an NVIDIA GPU, .*; torch can"),
        ("flash_attn", (9, 0), ["triton"], CUDA, BF16, "the package flash-attn is not installed; triton can"),
        ("flash_attn", (9, 0), ["triton", "flash_attn"], CUDA, FP32, "for a GPU, in float16 or bfloat16; triton can"),
        ("flash_attn", (9, 0), ["flash_attn"], CPU, FP16, "it is for a GPU, in float16 or bfloat16; torch can"),
        ("cpp", (9, 0), ["triton"], CPU, FP16, "it is for a CPU, in float32 or bfloat16; torch can"),
        ("cpp", (9, 0), ["triton"], CUDA, BF16, "it is for a CPU, in float32 or bfloat16; triton can"),
    ],
)
def test_a_choice_that_cannot_run_says_why_and_what_can(pretend, choice, capability, packages, device, dtype, message):
    pretend(capability, packages)

    with pytest.raises(ValueError, match=rf"^{choice} cannot be used on {device} in {dtype}: .*{message}$"):
        ops.choose(choice, device, dtype)


def test_the_interpreter_is_refused_for_a_gpu_and_for_bfloat16(pretend, monkeypatch):
    pretend((9, 0))
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    assert "TRITON_INTERPRET=1 is set" in ops.why_not("triton", CUDA, FP16)
    assert "bfloat16 wrong" in ops.why_not("triton", CPU, BF16)
    assert ops.why_not("triton", CPU, FP16) == ""


def test_triton_on_a_cpu_names_its_interpreter():
    if not ops._installed("triton"):
        pytest.skip("Triton is not installed")
    code = "import minisgl_kernels as ops, torch; ops.choose('triton', torch.device('cpu'), torch.float32)"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(ops.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)

    assert "ValueError: triton cannot be used on cpu" in done.stderr
    assert "its interpreter runs it, with TRITON_INTERPRET=1; " in done.stderr


def test_an_engine_refuses_a_backend_that_does_not_run_here(model):
    with pytest.raises(ValueError, match="cuda cannot be used on cpu"):
        Engine(model, EngineConfig(kv_pages=9, attention="cuda"))


@pytest.mark.parametrize("name", BACKENDS)
def test_each_backend_is_a_choice_that_the_config_explains(name):
    kinds = get_type_hints(EngineConfig)
    attention, _, kernels = EngineConfig.__doc__.partition("attention:")[2].partition("kernels:")

    assert get_args(kinds["attention"]) == ("auto", *BACKENDS)
    assert name in attention
    assert (name in get_args(kinds["kernels"])) == (f"{name} " in kernels or f"{name};" in kernels)


def test_only_triton_and_cuda_attend_without_lengths_on_the_host():
    assert {name for name in BACKENDS if not needs_lengths(name)} == {"triton", "cuda"}
