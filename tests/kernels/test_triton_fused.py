"""The fused Triton kernels against float64: in the interpreter where there is no GPU, in full size where there is."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from minisgl_kernels import reference
from minisgl_kernels import triton as ops

from tests.tolerances import FUSED, ROTATED

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-5
QWEN3, LLAMA2 = (16, 8, 128), (32, 32, 128)  # heads, KV heads, head_dim
FP16 = torch.float16


@pytest.fixture(params=[torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
def dtype(request):
    if reason := ops.why_unavailable(DEVICE, request.param):
        pytest.skip(reason)
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


def random(*shape, dtype=FP16, seed=0):
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).to(dtype)


def rows_apart(x, pad=8):
    """x [T, …] as a view whose rows have NaN between them."""
    flat = x.flatten(1)
    wide = torch.full((len(x), flat.shape[1] + pad), torch.nan, dtype=x.dtype, device=x.device)
    wide[:, : flat.shape[1]] = flat
    return wide[:, : flat.shape[1]].unflatten(1, x.shape[1:])


def exact_norm(x, weight):
    x = x.double()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + EPS) * weight.double()


def exact_rope(x, cos, sin):
    return reference.apply_rope(x.double(), cos.double(), sin.double())


def angles(tokens, head_dim, dtype):
    angle = 10 * random(tokens, head_dim // 2, dtype=torch.float32, seed=9)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def attention_inputs(tokens, heads, kv_heads, head_dim, dtype, weights=True, num_slots=None):
    """Arguments of qk_norm_rope_store; the pool holds NaN, its slots come in a random order."""
    num_slots = num_slots or tokens + 5
    q_weight, k_weight = (1 + 0.2 * random(2, head_dim, seed=4).to(dtype)).unbind() if weights else (None, None)
    keys, values = torch.full((2, num_slots, kv_heads, head_dim), torch.nan, dtype=dtype, device=DEVICE)
    slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(5))[:tokens].to(DEVICE)
    x = rows_apart(random(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype))
    return x, q_weight, k_weight, EPS, *angles(tokens, head_dim, dtype), keys, values, slots


def check_attention_inputs(arguments, heads, kv_heads):
    """Run the op and compare q, K and V with float64; every slot that was not named must still be NaN."""
    x, q_weight, k_weight, _, cos, sin, keys, values, slots = arguments
    dtype = x.dtype

    q_out = ops.qk_norm_rope_store(*arguments)

    q, k, v = x.split([heads, kv_heads, kv_heads], dim=1)
    if q_weight is not None:
        q, k = exact_norm(q, q_weight), exact_norm(k, k_weight)
    assert q_out.dtype == dtype
    ROTATED[dtype].check(q_out.double(), exact_rope(q, cos, sin))
    ROTATED[dtype].check(keys[slots].double(), exact_rope(k, cos, sin))
    assert torch.equal(values[slots], v)
    untouched = torch.ones(len(keys), dtype=torch.bool, device=DEVICE)
    untouched[slots] = False
    assert keys[untouched].isnan().all()
    assert values[untouched].isnan().all()


@pytest.mark.parametrize("hidden", [1, 7, 64, 576, 1024, 3001])
@pytest.mark.parametrize("tokens", [1, 3, 17])
def test_add_rms_norm_gives_the_rounded_sum_and_its_norm(tokens, hidden, dtype):
    x, residual = rows_apart(random(tokens, hidden, dtype=dtype)), random(tokens, hidden, dtype=dtype, seed=1)
    weight = random(hidden, dtype=dtype, seed=2)

    normed, total = ops.add_rms_norm(x, residual, weight, EPS)

    assert torch.equal(total, residual + x)
    FUSED[dtype].check(normed.double(), exact_norm(total, weight))
    assert normed.dtype == dtype


def test_add_rms_norm_leaves_its_inputs_as_they_are(dtype):
    x, residual = random(5, 96, dtype=dtype), random(5, 96, dtype=dtype, seed=1)
    before = x.clone(), residual.clone()

    ops.add_rms_norm(x, residual, random(96, dtype=dtype, seed=2), EPS)

    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_without_a_residual_the_input_itself_is_the_sum(dtype):
    x, weight = random(3, 40, dtype=dtype), random(40, dtype=dtype, seed=1)

    normed, total = ops.add_rms_norm(x, None, weight, EPS)

    assert total is x
    FUSED[dtype].check(normed.double(), exact_norm(x, weight))


def test_a_row_of_large_numbers_does_not_overflow_the_sum_of_squares(dtype):
    x, weight = 300 * random(2, 576, dtype=dtype), random(576, dtype=dtype, seed=1)  # squares reach 10⁶

    FUSED[dtype].check(ops.rms_norm(x, weight, EPS).double(), exact_norm(x, weight))


@pytest.mark.parametrize("shape", [(9,), (3, 50), (4, 5, 64), (2, 3, 4, 16)], ids=str)
def test_rms_norm_normalises_the_last_dimension_of_any_shape(shape, dtype):
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)

    FUSED[dtype].check(ops.rms_norm(x, weight, EPS).double(), exact_norm(x, weight))


def test_rms_norm_reads_the_heads_of_a_larger_tensor_in_place(dtype):
    heads = rows_apart(random(5, 7, 64, dtype=dtype))[:, 2:5]
    weight = random(64, dtype=dtype, seed=1)

    FUSED[dtype].check(ops.rms_norm(heads, weight, EPS).double(), exact_norm(heads, weight))


@pytest.mark.parametrize("width", [1, 33, 1024, 1536, 2100])
@pytest.mark.parametrize("tokens", [1, 3, 17])
def test_silu_and_mul_gates_with_the_first_half_and_multiplies_the_second(tokens, width, dtype):
    gate_up = rows_apart(3 * random(tokens, 2 * width, dtype=dtype))
    gate, up = gate_up.double().chunk(2, dim=-1)

    out = ops.silu_and_mul(gate_up)

    assert out.dtype == dtype
    FUSED[dtype].check(out.double(), gate / (1 + (-gate).exp()) * up)


@pytest.mark.filterwarnings("ignore:overflow")  # of the interpreter's exp, as meant
def test_silu_of_large_numbers_is_finite(dtype):
    gate = torch.tensor([[-1000.0, -90.0, 90.0, 1000.0]], device=DEVICE)
    gate_up = torch.cat([gate, torch.ones_like(gate)], dim=1).to(dtype)

    FUSED[dtype].check(ops.silu_and_mul(gate_up).double(), gate_up.double()[:, :4].relu())


@pytest.mark.parametrize("hidden", [1, 40, 576, 5000])
def test_embedding_copies_the_rows_that_the_ids_name(hidden, dtype):
    weight = random(31, hidden, dtype=dtype)
    ids = torch.tensor([30, 0, 7, 7, 12], device=DEVICE)

    assert torch.equal(ops.embedding(ids, weight), weight[ids])


def test_an_id_outside_the_table_gives_nan_and_reads_nothing_else():
    ids = torch.tensor([-1, 3, 4], device=DEVICE)
    weight = random(4, 24)

    out = ops.embedding(ids, weight)

    assert out[[0, 2]].isnan().all()
    assert torch.equal(out[1], weight[3])


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("part", [slice(None), slice(1, 4)], ids=["all heads", "some heads"])
def test_apply_rope_rotates_each_head_by_its_tokens_angles(part, head_dim, dtype):
    x = rows_apart(random(5, 6, head_dim, dtype=dtype))[:, part]
    cos, sin = angles(5, head_dim, dtype)

    ROTATED[dtype].check(ops.apply_rope(x, cos, sin).double(), exact_rope(x, cos, sin))


@pytest.mark.parametrize("weights", [True, False], ids=["norms", "no norms"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("tokens", "heads", "kv_heads"), [(1, 9, 3), (3, 16, 8), (17, 9, 3)])
def test_q_is_returned_and_k_and_v_lie_in_their_slots(tokens, heads, kv_heads, head_dim, weights, dtype):
    arguments = attention_inputs(tokens, heads, kv_heads, head_dim, dtype, weights)

    check_attention_inputs(arguments, heads, kv_heads)


def test_qk_norm_rope_store_leaves_its_inputs_as_they_are(dtype):
    arguments = attention_inputs(7, 9, 3, 64, dtype)
    inputs = [arguments[i] for i in (0, 1, 2, 4, 5, 8)]  # all but eps, keys and values
    before = [tensor.clone() for tensor in inputs]

    ops.qk_norm_rope_store(*arguments)

    assert all(torch.equal(tensor, copy) for tensor, copy in zip(inputs, before, strict=True))


@pytest.mark.filterwarnings("ignore:invalid value")  # in the rotation of those infinities, which is not stored
def test_v_keeps_infinities_and_the_sign_of_zero(dtype):
    arguments = attention_inputs(2, 2, 1, 16, dtype)
    arguments[0][:, 3, :4] = torch.tensor([torch.inf, -torch.inf, -0.0, 0.0])

    ops.qk_norm_rope_store(*arguments)

    stored = arguments[7][arguments[8]]
    assert torch.equal(stored, arguments[0][:, 3:])
    assert torch.equal(stored.signbit(), arguments[0][:, 3:].signbit())


@pytest.mark.parametrize("tokens", [0, 2])
def test_no_tokens_are_no_work(tokens):
    x, weight = random(tokens, 32), random(32, seed=1)

    assert ops.add_rms_norm(x, x, weight, EPS)[0].shape == (tokens, 32)
    assert ops.silu_and_mul(x).shape == (tokens, 16)
    assert ops.embedding(torch.zeros(tokens, dtype=torch.int64, device=DEVICE), x.new_ones(3, 32)).shape == x.shape
    assert ops.qk_norm_rope_store(*attention_inputs(tokens, 4, 2, 16, FP16)).shape == (tokens, 4, 16)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda x: ops.rms_norm(x.double(), x[0].double(), EPS), "float32, float16 and bfloat16"),
        (lambda x: ops.rms_norm(x, x[0].float(), EPS), "float16 on .* beside torch.float32"),
        (lambda x: ops.add_rms_norm(x, x[:3], x[0], EPS), r"x is \[6, 6\] and the residual \[3, 6\]"),
        (lambda x: ops.add_rms_norm(x, x.T, x[0], EPS), "the last dimension has stride 6"),
        (lambda x: ops.silu_and_mul(x[:, :5]), "5 columns do not halve"),
        (lambda x: ops.silu_and_mul(x.T), "the last dimension has stride 6"),
        (lambda x: ops.embedding(x[0].int(), x), "not .T. int64"),
        (lambda x: ops.apply_rope(x.view(6, 2, 3), x[:, :1], x[:, :1]), "are not both"),
        (lambda x: ops.apply_rope(x.view(6, 1, 6), x[:, :2], x[:, :2]), "are not both"),
    ],
)
def test_what_the_kernels_do_not_know_is_refused_with_the_fallback(call, reason):
    with pytest.raises(ValueError, match=f"{reason}.*use --kernels torch"):
        call(random(6, 6))


@pytest.mark.parametrize(
    ("place", "argument", "reason"),
    [
        (1, lambda: None, "both or neither"),
        (0, lambda: random(3, 32, 8).transpose(1, 2), "last dimension has stride"),
        (6, lambda: random(9, 32, 2).transpose(1, 2), "last dimension has stride"),
        (6, lambda: random(9, 4, 32)[:, ::2], "64 in the pool"),
        (7, lambda: random(8, 2, 32), "values"),
        (8, lambda: torch.zeros(3, dtype=torch.int32, device=DEVICE), "int32, not .3. int64"),
        (8, lambda: torch.zeros(2, dtype=torch.int64, device=DEVICE), "not .3. int64"),
    ],
)
def test_a_store_that_does_not_fit_is_refused_with_the_fallback(place, argument, reason):
    arguments = list(attention_inputs(3, 4, 2, 32, FP16, num_slots=9))
    arguments[place] = argument()

    with pytest.raises(ValueError, match=f"{reason}.*use --kernels torch"):
        ops.qk_norm_rope_store(*arguments)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("hidden", "tokens"), [(1024, 16384), (4096, 16384), (16384, 300)])
def test_add_rms_norm_in_full_size(hidden, tokens, dtype):
    test_add_rms_norm_gives_the_rounded_sum_and_its_norm(tokens, hidden, dtype)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("width", [3072, 11008])
def test_silu_and_mul_in_full_size(width, dtype):
    test_silu_and_mul_gates_with_the_first_half_and_multiplies_the_second(16384, width, dtype)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("shape", "weights"), [(QWEN3, True), (LLAMA2, False)], ids=["Qwen3-0.6B", "Llama-2-7B"])
def test_qk_norm_rope_store_in_full_size(shape, weights, dtype):
    check_attention_inputs(attention_inputs(16384, *shape, dtype, weights), *shape[:2])


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_a_slot_beyond_two_to_the_31_elements_is_written_where_it_lies():
    heads, kv_heads, head_dim = QWEN3
    num_slots = 2**31 // (kv_heads * head_dim) + 64
    if torch.cuda.mem_get_info()[0] < 4 * num_slots * kv_heads * head_dim * 2:
        pytest.skip("needs 18 GB of free GPU memory")
    arguments = attention_inputs(3, heads, kv_heads, head_dim, FP16, num_slots=num_slots)
    slots = arguments[-1].copy_(torch.tensor([num_slots - 1, 1, num_slots - 40]))
    keys, values = arguments[6:8]

    q = ops.qk_norm_rope_store(*arguments)

    assert q.isfinite().all()
    assert keys[slots].isfinite().all()
    assert torch.equal(values[slots], arguments[0][:, -kv_heads:])


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_all_ops_can_be_captured_in_a_graph_and_replayed_on_new_inputs():
    arguments = attention_inputs(3, *QWEN3, FP16)
    x, residual, weight = random(3, 1024), random(3, 1024, seed=1), random(1024, seed=2)
    ids, table = torch.tensor([1, 2, 0], device=DEVICE), random(5, 64)

    def step():
        return (
            *ops.add_rms_norm(x, residual, weight, EPS),
            ops.silu_and_mul(x),
            ops.embedding(ids, table),
            ops.qk_norm_rope_store(*arguments),
            ops.apply_rope(arguments[0], *arguments[4:6]),
        )

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for changed in (x, residual, arguments[0]):
        changed.copy_(random(*changed.shape, seed=7))
    ids.copy_(torch.tensor([4, 4, 3]))
    graph.replay()

    assert all(torch.equal(replayed, eager) for replayed, eager in zip(captured, step(), strict=True))
