"""Decode attention from the qkv projection on against float64: in the interpreter, or in full size on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from minisgl_kernels import reference
from minisgl_kernels import triton as ops
from minisgl_kernels.launches import overlapping
from minisgl_kernels.triton import decode, decode_ops

from minisgl.attention.triton_backend import TritonAttention
from minisgl.core import ForwardBatch, PagedRows, WorkCounts
from minisgl.kvcache.mha_pool import MHAPool
from minisgl.layers.attention import FusedAttention, OneKernelAttention
from tests.tolerances import PAGED_ATTENTION, ROTATED

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
if reason := ops.why_unavailable(DEVICE, FP16):
    pytest.skip(reason, allow_module_level=True)

EPS = 1e-6
DTYPES = [dtype for dtype in (FP32, FP16, BF16) if not ops.why_unavailable(DEVICE, dtype)]
HALVES = [dtype for dtype in DTYPES if dtype != FP32]
SHAPES = [(1, 2, 64), (2, 1, 128), (3, 2, 80), (4, 1, 96), (8, 1, 64), (2, 8, 64), (3, 3, 64)]  # group, KV heads, size
# Each with norms in one dtype and without in the next, which go round: Triton compiles each case for seconds.
CASES = [
    (*shape, norms, DTYPES[(i + norms) % len(DTYPES)]) for i, shape in enumerate(SHAPES) for norms in (True, False)
]
QWEN3 = {"group": 2, "kv_heads": 8, "head_dim": 128}
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's, of unstored rows
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")


@pytest.fixture(autouse=True)
def poisoned():
    """What an op allocates and does not write is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def splits(monkeypatch, request):
    """Cut every sequence into this many splits, whatever the batch; tiles of keys as small as they come."""
    launch_for = decode.launch_for
    monkeypatch.setattr(decode, "launch_for", lambda *batch: (request.param, 16, *launch_for(*batch)[2:]))


@dataclass
class Scene:
    """One new token of each sequence, whose slot is NaN as all that is free; page tables end in pages that are not."""

    qkv: torch.Tensor  # [T, (group + 2) · kv_heads, head_dim], of wider rows whose rest is NaN
    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor
    page_table: torch.Tensor
    page_size: int
    kv_lens: torch.Tensor

    @property
    def store(self):
        """The arguments of qk_norm_rope_store."""
        rotation = (EPS, self.cos, self.sin)
        return self.qkv, self.q_weight, self.k_weight, *rotation, self.keys, self.values, self.slots

    @property
    def arguments(self):
        return *self.store, self.page_table, self.page_size, self.kv_lens, self.qkv.shape[2] ** -0.5

    def clone(self):
        """The same with a pool of its own."""
        return replace(self, keys=self.keys.clone(), values=self.values.clone())

    def exact(self, q, window=0):
        """Attention of q over the pool in float64."""
        starts = torch.arange(len(self.kv_lens) + 1, device=DEVICE)
        paged = (self.page_table, self.page_size, self.kv_lens, starts, q.shape[2] ** -0.5, window)
        return reference.paged_attention(q.double(), self.keys.double(), self.values.double(), *paged)

    def check(self, window=0):
        """Run the op; compare with attention in float64 over what qk_norm_rope_store rounds and stores, and K and V
        with its own. Returns the result."""
        stored = self.clone()
        expected = stored.exact(ops.qk_norm_rope_store(*stored.store), window)

        out = ops.qkv_decode(*self.arguments, window)

        assert out.dtype == self.qkv.dtype
        assert out.is_contiguous()
        check_scaled(out, expected)
        self.check_pool(stored)
        return out

    def check_pool(self, stored):
        """The new tokens' K and V are there as in another scene, and all else is as it was."""
        ROTATED[self.keys.dtype].check(self.keys[self.slots], stored.keys[self.slots])
        assert torch.equal(self.values[self.slots], stored.values[self.slots])
        rest = torch.ones(len(self.keys), dtype=torch.bool, device=DEVICE)
        rest[self.slots] = False
        for own, other in ((self.keys, stored.keys), (self.values, stored.values)):
            assert torch.equal(own[rest].nan_to_num(7.0), other[rest].nan_to_num(7.0))


def check_scaled(actual, expected):
    """Each head's result is scaled to a root mean square of 1: long sequences average to 0."""
    size = expected.square().mean(dim=-1, keepdim=True).sqrt()
    PAGED_ATTENTION[actual.dtype].check(actual.double() / size, expected / size)


def scene(lengths, dtype=DTYPES[-1], group=2, kv_heads=2, head_dim=64, page_size=16, norms=True, seed=0):
    """Sequences of so many tokens, the new one included, in shuffled pages."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator, device=DEVICE)

    batch, width = len(lengths), max(-(-length // page_size) for length in lengths) + 1
    order = 1 + torch.randperm(batch * width, generator=generator, device=DEVICE).view(batch, width)
    keys, values = torch.full((2, (1 + batch * width) * page_size, kv_heads, head_dim), torch.nan, device=DEVICE)
    page_table, slots = torch.full((batch, width), 10**9, device=DEVICE), []
    for b, length in enumerate(lengths):
        needed = -(-length // page_size)
        page_table[b, :needed] = order[b, :needed]
        places = torch.arange(length, device=DEVICE)
        own = order[b, places // page_size] * page_size + places % page_size
        keys[own[:-1]], values[own[:-1]] = random(2, length - 1, kv_heads, head_dim)
        slots.append(own[-1])
    all_heads = (group + 2) * kv_heads
    qkv = torch.full((batch, all_heads + 1, head_dim), torch.nan, device=DEVICE)
    qkv[:, :all_heads] = 1.5 * random(batch, all_heads, head_dim)
    angles = 10 * random(batch, head_dim // 2)
    q_weight, k_weight = (1 + 0.2 * random(2, head_dim)).to(dtype).unbind() if norms else (None, None)
    lens = torch.tensor(lengths, device=DEVICE)
    angles = (angles.cos().to(dtype), angles.sin().to(dtype))
    return Scene(
        qkv.to(dtype)[:, :all_heads], q_weight, k_weight, *angles, keys.to(dtype), values.to(dtype),
        torch.stack(slots), page_table, page_size, lens,
    )  # fmt: skip


def name(value):
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize(("group", "kv_heads", "head_dim", "norms", "dtype"), CASES, ids=name)
def test_one_token_of_each_sequence_in_every_shape(group, kv_heads, head_dim, norms, dtype):
    scene((1, 70, 16), dtype, group, kv_heads, head_dim, norms=norms).check()


@pytest.mark.parametrize("norms", [True, False], ids=["norms", "no norms"])
def test_in_float32_it_is_the_definition(norms):
    """From qkv on in float64: what the other tests take from qk_norm_rope_store is in this."""
    given = scene((1, 2, 40), FP32, norms=norms)
    heads = given.qkv.double()
    if norms:
        normed = heads * torch.rsqrt(heads.square().mean(dim=-1, keepdim=True) + EPS)
        weights = torch.stack([given.q_weight] * 4 + [given.k_weight] * 2).double()
        heads = torch.cat([normed[:, :6] * weights, heads[:, 6:]], dim=1)
    rotated = reference.apply_rope(heads[:, :6], given.cos.double(), given.sin.double())
    exact = given.clone()
    exact.keys, exact.values = exact.keys.double(), exact.values.double()
    exact.keys[given.slots], exact.values[given.slots] = rotated[:, 4:], heads[:, 6:]

    out = ops.qkv_decode(*given.arguments)

    check_scaled(out, exact.exact(rotated[:, :4]))
    ROTATED[FP32].check(given.keys[given.slots].double(), rotated[:, 4:])
    check_scaled(reference.qkv_decode(*scene((1, 2, 40), FP32, norms=norms).arguments), exact.exact(rotated[:, :4]))


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_lengths_around_the_end_of_a_page(page_size):
    scene([length for length in range(page_size - 1, page_size + 3) if length], page_size=page_size).check()


@pytest.mark.parametrize("splits", [1, 2, 5, 64], indirect=True)
def test_the_number_of_splits_does_not_change_the_result(splits):
    scene((1, 2, 15, 16, 17, 18, 32, 33, 34, 300), kv_heads=1).check()  # tiles of 16 keys before the new one


@pytest.mark.parametrize("splits", [1, 3], indirect=True)
@pytest.mark.parametrize("window", [1, 33] if ON_GPU else [1, 2, 16, 17, 33, 1000])  # each compiles two kernels
def test_a_window_counts_the_new_token(splits, window):
    scene((1, 2, 17, 90), kv_heads=1).check(window)


@pytest.mark.parametrize("splits", [5], indirect=True)
def test_splits_leave_their_counters_at_zero_for_the_next_launch_and_for_paged_decode(splits):
    for seed in range(3):
        scene((1, 200, 64), seed=seed).check()
        assert not decode._arrivals(torch.empty(0, device=DEVICE).device).any()


@pytest.mark.parametrize("splits", [1, 3], indirect=True)
def test_what_stood_in_the_new_tokens_slot_is_not_read(splits):
    given, other = scene((1, 33, 60)), scene((1, 33, 60))
    other.keys[other.slots], other.values[other.slots] = 1e4, torch.inf

    assert torch.equal(ops.qkv_decode(*given.arguments), ops.qkv_decode(*other.arguments))


@pytest.mark.parametrize("splits", [1, 3], indirect=True)
def test_large_scores_do_not_overflow(splits):
    given = scene((1, 2, 80), norms=False)
    given.qkv.mul_(20)

    given.check()


def test_sequences_may_share_the_pages_before_their_own():
    given = scene((40, 40, 33))
    given.page_table[1:, :2] = given.page_table[0, :2]

    given.check()


def test_inputs_are_left_as_they_are():
    given = scene((3, 40))
    inputs = [
        x for x in given.arguments if isinstance(x, torch.Tensor) and x is not given.keys and x is not given.values
    ]
    before = [x.clone() for x in inputs]

    ops.qkv_decode(*given.arguments)

    assert all(torch.equal(x, copy) for x, copy in zip(inputs, before, strict=True))


def test_no_tokens_are_no_work():
    given = scene((3,))
    for each in ("qkv", "cos", "sin", "slots", "page_table", "kv_lens"):
        setattr(given, each, getattr(given, each)[:0])

    assert ops.qkv_decode(*given.arguments).shape == (0, 4, 64)


@pytest.mark.parametrize(
    ("changed", "value", "message"),
    [
        ("q_weight", lambda x: None, "both or neither"),
        ("cos", lambda x: x[:, :5], "are not both"),
        ("sin", lambda x: x.float(), "beside torch.float32"),
        ("slots", lambda x: x.int(), r"int32, not \[2\] int64"),
        ("slots", lambda x: x[:1], r"not \[2\] int64"),
        ("kv_lens", lambda x: x[:1], "2 tokens for 1 lengths and 2 page tables"),
        ("page_table", lambda x: x[:1], "2 tokens for 2 lengths and 1 page tables"),
        ("values", lambda x: x[:, :1], "do not fit"),
        ("qkv", lambda x: x[:, :7], "do not fit"),  # three query heads for two KV heads
        ("qkv", lambda x: x[:, :4], "4 heads of q, k and v, of which 2 are k"),
        ("qkv", lambda x: x.to(torch.int32), "float32, float16 and bfloat16"),
    ],
)
def test_what_the_kernel_does_not_know_is_refused_with_the_fallback(changed, value, message):
    given = scene((3, 40), FP16)
    setattr(given, changed, value(getattr(given, changed)))

    with pytest.raises(ValueError, match=f"qkv_decode in Triton: .*{message}.*; use --(kernels|attention) torch"):
        ops.qkv_decode(*given.arguments)


# The layer that hands everything behind the projection to the backend.


@pytest.fixture
def few_splits(monkeypatch):
    if not ON_GPU:  # a small batch has 32 splits, and the interpreter takes a millisecond for an empty one, too
        monkeypatch.setattr(decode, "launch_for", lambda programs, row_bytes: (2, 16, 2, 2))


def attend_in(layer, query_lens, eps=EPS):
    """A layer of this class over sequences of 20 tokens before the step's: its result, the pool and the work."""
    hidden, heads, kv_heads, head_dim, tokens = 48, 4, 2, 16, sum(query_lens)
    generator = torch.Generator(DEVICE).manual_seed(0)
    attention = layer(1, hidden, heads, kv_heads, head_dim, qk_norm_eps=eps).to(DEVICE, FP32)
    attention.ops = ops
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, 0.5, 0.2, generator=generator)
    pool = MHAPool(2, 13, 8, kv_heads, head_dim, FP32, DEVICE)
    pool.kv.normal_(generator=generator)
    places = [(1 + 4 * b) * 8 + 20 + i for b, new in enumerate(query_lens) for i in range(new)]
    page_table = torch.arange(1, 1 + 4 * len(query_lens), device=DEVICE).view(-1, 4)
    kv_lens = [20 + new for new in query_lens]
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(DEVICE)
    lens = torch.tensor(kv_lens, device=DEVICE)
    rows = PagedRows(torch.tensor(places, device=DEVICE), page_table, query_lens, kv_lens, starts, lens)
    work = WorkCounts()
    batch = ForwardBatch(torch.empty(0), torch.empty(0), TritonAttention(pool, rows, work))
    angles = torch.linspace(0, 9, tokens * head_dim // 2, device=DEVICE).view(tokens, -1)
    x = torch.randn(tokens, hidden, device=DEVICE, generator=generator)
    with torch.inference_mode():
        out = attention(x, (angles.cos(), angles.sin()), batch)
    return out, pool.kv, work


@pytest.mark.usefixtures("few_splits")
@pytest.mark.parametrize("eps", [EPS, None], ids=["norms", "no norms"])
@pytest.mark.parametrize("query_lens", [[1], [1, 1, 1], [1, 3]], ids=str)
def test_a_layer_of_one_kernel_gives_what_the_fused_layer_gives_and_counts_the_same_work(query_lens, eps):
    out, kv, work = attend_in(OneKernelAttention, query_lens, eps)
    expected, expected_kv, expected_work = attend_in(FusedAttention, query_lens, eps)

    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    ROTATED[FP32].check(kv, expected_kv)
    assert work == expected_work


@pytest.mark.usefixtures("few_splits")
@pytest.mark.parametrize(("query_lens", "op"), [([1, 1], "qkv_decode"), ([1, 2], "qk_norm_rope_store")])
def test_one_kernel_serves_steps_of_one_token_a_sequence(query_lens, op, monkeypatch):
    called = []
    for each in ("qkv_decode", "qk_norm_rope_store"):
        real = getattr(ops, each)
        monkeypatch.setattr(ops, each, lambda *a, each=each, real=real: called.append(each) or real(*a))

    attend_in(OneKernelAttention, query_lens)

    assert called == [op]


# In full size, with what only a GPU has. Shapes of Qwen3-0.6B, so that Triton compiles little.


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", HALVES, ids=name)
@pytest.mark.parametrize(
    ("batch", "longest"), [(1, 32_768), (1, 1), (2, 32_001), (16, 1024), (64, 517), (100, 300), (256, 1024), (256, 3)]
)
def test_one_sequence_or_many(batch, longest, dtype):
    scene([max(1, longest - 7 * i % longest) for i in range(batch)], dtype, **QWEN3).check()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("on", [True, False], ids=["overlapping", "one by one"])
def test_a_captured_launch_follows_lengths_and_page_tables(on):
    given, changed = scene((40, 300), **QWEN3), scene((301, 17), **QWEN3, seed=1)
    changed.q_weight, changed.k_weight = given.q_weight, given.k_weight  # of the model
    with overlapping(on):
        ops.qkv_decode(*given.arguments)  # Triton compiles at the first launch
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = ops.qkv_decode(*given.arguments)
    stored = changed.clone()
    expected = stored.exact(ops.qk_norm_rope_store(*stored.store))
    for each in ("qkv", "cos", "sin", "keys", "values", "slots", "page_table", "kv_lens"):
        getattr(given, each).copy_(getattr(changed, each))
    out.fill_(torch.nan)

    graph.replay()

    check_scaled(out, expected)
    given.check_pool(stored)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("batch", [1, 16, 128])
def test_a_graph_of_overlapping_layers_gives_the_bits_of_one_after_another(batch):
    """Each layer's qkv is a product with the result of the layer before: one that does not wait sees an older one."""
    torch.use_deterministic_algorithms(False)  # it would put a kernel of torch between ours
    layers = [scene([500 - 3 * i for i in range(batch)], **QWEN3, seed=seed) for seed in range(4)]
    generator, shape = torch.Generator(DEVICE).manual_seed(9), (32 * 128, 16 * 128)
    weights = [(torch.randn(shape, generator=generator, device=DEVICE) / 45).to(DTYPES[-1]) for _ in layers]
    first = layers[0].qkv.clone()
    torch.cuda.synchronize()  # a product may read weights before the kernel before it ends

    def step():
        qkv = first
        for layer, weight in zip(layers, weights, strict=True):
            out = ops.qkv_decode(*replace(layer, qkv=qkv).arguments)  # [T, 16, 128]
            qkv = decode_ops.linear(out.flatten(1), weight).unflatten(1, (32, 128))
        return qkv

    def replayed(on):
        with overlapping(on):
            step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = step()
        for i in range(20):
            first.copy_(torch.randn(first.shape, generator=torch.Generator(DEVICE).manual_seed(i), device=DEVICE))
            graph.replay()
            yield out.clone(), layers[-1].keys[layers[-1].slots].clone()

    for overlapped, alone in zip(list(replayed(True)), list(replayed(False)), strict=True):
        assert overlapped[0].isfinite().all()
        assert all(torch.equal(one, other) for one, other in zip(overlapped, alone, strict=True))


@pytest.mark.gpu
@needs_gpu
def test_it_launches_on_the_current_stream_and_waits_for_nothing():
    given = scene((1000, 900), **QWEN3)
    ops.qkv_decode(*given.arguments)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        ops.qkv_decode(*given.arguments)
        assert not stream.query()
    stream.synchronize()
