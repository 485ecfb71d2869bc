"""Triton's attention over pages against float64: in the interpreter, or in full size where there is a GPU."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from minisgl_kernels import triton as ops
from minisgl_kernels.launches import overlapping
from minisgl_kernels.triton import decode

from tests.tolerances import PAGED_ATTENTION

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
if reason := ops.why_unavailable(DEVICE, FP16):
    pytest.skip(reason, allow_module_level=True)

DTYPES = [dtype for dtype in (FP32, FP16, BF16) if not ops.why_unavailable(DEVICE, dtype)]
HEAD_DIMS, GROUPS, PAGES = [64, 80, 96, 128, 256], [1, 2, 3, 4, 8], [1, 16, 64, 256]
CELLS = [(i, j) for i in range(5) for j in range(5)]
# Each pair of head_dim and group once, with page sizes and dtypes that go round: every pair of two values comes up.
DECODES = [(HEAD_DIMS[i], GROUPS[j], PAGES[(i + j) % 4], DTYPES[(i + 2 * j) % len(DTYPES)]) for i, j in CELLS]
# Every second pair: Triton compiles a flash kernel for three seconds, and one in float32 for ten.
SHORT = [dtype for dtype in DTYPES if not (ON_GPU and dtype == FP32)]
CHUNKS = [
    (HEAD_DIMS[i], GROUPS[j], PAGES[(i + j) // 2 % 4], SHORT[(i + (i + j) // 2) % len(SHORT)])
    for i, j in CELLS
    if (i + j) % 2 == 0
]
if not ON_GPU:  # the interpreter takes seconds
    DECODES, CHUNKS = DECODES[::7], CHUNKS[::3]
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's, of unstored rows
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")


@pytest.fixture(autouse=True)
def poisoned():
    """What an op allocates and does not write is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@dataclass
class Scene:
    """Sequences in a pool, whose free slots are NaN and whose page tables end in page numbers that do not exist."""

    spans: list[tuple[int, int]]  # of each sequence, the tokens of this step and all tokens
    q: torch.Tensor  # [T, heads, head_dim]
    keys: torch.Tensor  # [slots, kv_heads, head_dim]
    values: torch.Tensor
    page_table: torch.Tensor  # [B, P]
    page_size: int
    kv_lens: torch.Tensor  # [B]
    query_starts: torch.Tensor  # [B + 1]

    @property
    def arguments(self):
        rows = (self.page_table, self.page_size, self.kv_lens, self.query_starts)
        return self.q, self.keys, self.values, *rows, self.q.shape[2] ** -0.5

    def exact(self, window=0):
        """What attention over this scene is, in float64: [T, heads, head_dim]."""
        results = []
        for b, (new, length) in enumerate(self.spans):
            places = torch.arange(length, device=DEVICE)
            slots = self.page_table[b, places // self.page_size] * self.page_size + places % self.page_size
            keys, values = self.keys[slots].double(), self.values[slots].double()
            first = int(self.query_starts[b])
            for asks in (length - new + torch.arange(new, device=DEVICE)).split(256):
                q = self.q[first : first + len(asks)].double().unflatten(1, (keys.shape[1], -1))  # [n, kv, group, D]
                scores = torch.einsum("nkgd,skd->nkgs", q, keys) * self.q.shape[2] ** -0.5
                seen = (places <= asks[:, None]) & (places > asks[:, None] - (window or length))
                weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
                results.append(torch.einsum("nkgs,skd->nkgd", weights, values).flatten(1, 2))
                first += len(asks)
        return torch.cat(results)

    def check(self, actual, window=0, rows=slice(None)):
        """Compare with float64, each head's result scaled to a root mean square of 1: long sequences average to 0."""
        expected = self.exact(window)[rows]
        size = expected.square().mean(dim=-1, keepdim=True).sqrt()
        assert actual.dtype == self.q.dtype
        PAGED_ATTENTION[actual.dtype].check(actual[rows].double() / size, expected / size)


def scene(
    spans, dtype=DTYPES[-1], head_dim=64, group=2, kv_heads=2, page_size=16, first_page=1, contiguous=False, seed=0
):
    """Sequences of (new, all) tokens in shuffled pages from first_page on; q is a part of wider rows, the rest NaN."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)

    needed = [-(-length // page_size) for _, length in spans]
    width = max(needed) + 1
    order = first_page + torch.randperm(len(spans) * width, generator=generator, device=DEVICE)
    num_slots = (first_page + len(order)) * page_size
    keys, values = torch.full((2, num_slots, kv_heads, head_dim), torch.nan, dtype=dtype, device=DEVICE)
    page_table = torch.full((len(spans), width), 10**9, device=DEVICE)
    for b, ((_, length), own) in enumerate(zip(spans, order.split(width), strict=True)):
        page_table[b, : needed[b]] = own[: needed[b]]
        places = torch.arange(length, device=DEVICE)
        slots = own[places // page_size] * page_size + places % page_size
        keys[slots], values[slots] = random(length, kv_heads, head_dim), random(length, kv_heads, head_dim)
    starts = [0, *itertools.accumulate(new for new, _ in spans)]
    q = random(starts[-1], group * kv_heads, head_dim)
    if not contiguous:
        qkv = torch.full((starts[-1], (group + 2) * kv_heads, head_dim), torch.nan, dtype=dtype, device=DEVICE)
        qkv[:, : group * kv_heads] = q
        q = qkv[:, : group * kv_heads]
    lens = torch.tensor([length for _, length in spans], device=DEVICE)
    return Scene(spans, q, keys, values, page_table, page_size, lens, torch.tensor(starts, device=DEVICE))


def decodes(*lengths):
    return [(1, length) for length in lengths]


def chunks(*lengths):
    return [(length, length) for length in lengths]


def around(*sizes):
    """Lengths at and beside these."""
    return sorted({size + by for size in sizes for by in (-1, 0, 1)} - {0})


def counters():
    return decode._arrivals(torch.empty(0, device=DEVICE).device)


@pytest.fixture
def splits(monkeypatch, request):
    """Cut every sequence into this many splits, whatever the batch."""
    launch_for = decode.launch_for
    monkeypatch.setattr(decode, "launch_for", lambda *batch: (request.param, *launch_for(*batch)[1:]))


def name(value):
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize(("head_dim", "group", "page_size", "dtype"), DECODES, ids=name)
def test_decodes_in_every_shape(head_dim, group, page_size, dtype):
    lengths = (max(1, page_size - 1), page_size, page_size + 1, 2000 if ON_GPU else 150)
    paged = scene(decodes(*lengths), dtype, head_dim, group, 2, page_size)

    paged.check(ops.paged_attention(*paged.arguments, max_queries=1))


@pytest.mark.parametrize(("head_dim", "group", "page_size", "dtype"), CHUNKS, ids=name)
def test_chunks_in_every_shape(head_dim, group, page_size, dtype):
    spans = [(70, 70), (33, 1000), (600, 700)] if ON_GPU else [(70, 70), (33, 75)]
    paged = scene(spans, dtype, head_dim, group, 2, page_size)

    paged.check(ops.flash_attention(*paged.arguments))


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_decodes_beside_chunks(dtype):
    paged = scene([(1, 1), (2, 2), (1, 100), (33, 90)], dtype)

    paged.check(ops.paged_attention(*paged.arguments))


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_decodes_around_the_end_of_a_page_and_of_a_tile_of_keys(page_size):
    lengths = around(page_size, 64, 128)  # tiles are of 64 keys
    for i in range(0, len(lengths), 4):  # batches of up to four have one number of splits
        paged = scene(decodes(*lengths[i : i + 4]), page_size=page_size)
        paged.check(ops.paged_attention(*paged.arguments, max_queries=1))


@pytest.mark.parametrize("group", [2, 3])
def test_chunks_around_the_end_of_a_tile_of_queries_and_of_keys(group):
    paged = scene(chunks(*around(64 // group, 128 // group, 256 // group, 64)), group=group)

    paged.check(ops.flash_attention(*paged.arguments))


def test_a_chunk_sees_what_was_computed_before_it():
    paged = scene([(20, 20 + prefix) for prefix in (1, 43, 44, 45, 64, 65)])

    paged.check(ops.flash_attention(*paged.arguments))


@pytest.mark.parametrize("window", [7, 64] if ON_GPU else [1, 7, 63, 64, 65, 1000])  # each compiles two kernels
def test_a_window_hides_what_is_further_back(window):
    paged = scene([(1, 200), (1, 3), (80, 80), (40, 150)], group=1)

    paged.check(ops.paged_attention(*paged.arguments, window), window)


@pytest.mark.parametrize("splits", [1, 2, 5, 64], indirect=True)
def test_the_number_of_splits_does_not_change_the_result(splits):
    paged = scene(decodes(1, 2, 65, 129, 1500), kv_heads=1)  # up to 24 splits have keys

    paged.check(ops.paged_decode(*paged.arguments))


def test_a_batch_that_fills_the_gpu_is_not_split(monkeypatch):
    monkeypatch.setattr(decode, "MOST_PROGRAMS", 1)  # now five sequences are as good as hundreds
    paged = scene(decodes(1, 127, 128, 129, 300))

    assert decode.launch_for(10, 128)[0] == 1
    paged.check(ops.paged_decode(*paged.arguments))


@pytest.mark.parametrize("splits", [7], indirect=True)
def test_splits_of_a_window(splits):
    paged = scene(decodes(1, 90, 400))

    paged.check(ops.paged_decode(*paged.arguments, 100), 100)


@pytest.mark.parametrize("splits", [5], indirect=True)
def test_splits_leave_their_counters_at_zero_for_the_next_launch(splits):
    for seed in range(3):
        paged = scene([(1, 1), (1, 300), (3, 3), (1, 64)], seed=seed)
        paged.check(ops.paged_decode(*paged.arguments), rows=[0, 1, 5])
        assert not counters().any()


@pytest.mark.parametrize("splits", [1, 5], indirect=True)
def test_a_decode_writes_no_row_of_a_chunk(splits):
    paged = scene([(3, 30), (1, 200), (2, 2)])
    out = torch.full(paged.q.shape, 7.0, dtype=paged.q.dtype, device=DEVICE)

    assert ops.paged_decode(*paged.arguments, out=out) is out
    assert (out[[0, 1, 2, 4, 5]] == 7).all()
    paged.check(out, rows=[3])


def test_flash_attention_writes_no_row_of_a_decode():
    paged = scene([(3, 30), (1, 200), (2, 2)])

    out = ops.flash_attention(*paged.arguments)
    assert out[3].isnan().all()
    paged.check(out, rows=[0, 1, 2, 4, 5])


@pytest.mark.parametrize("contiguous", [False, True])
def test_q_may_be_a_part_of_wider_rows(contiguous):
    paged = scene([(5, 50), (1, 70)], contiguous=contiguous)

    assert paged.q.is_contiguous() is contiguous
    out = ops.paged_attention(*paged.arguments)
    assert out.is_contiguous()
    paged.check(out)


def test_two_sequences_may_share_pages():
    paged = scene([(1, 40), (1, 40), (9, 40)])
    paged.page_table[1:, :2] = paged.page_table[0, :2]  # 32 of the 40 tokens

    paged.check(ops.paged_attention(*paged.arguments))


def test_large_scores_do_not_overflow():
    paged = scene([(1, 150), (40, 150)])
    paged.q.mul_(50)  # scores of deviation 400: weights between 1 and 0

    paged.check(ops.paged_attention(*paged.arguments))


@pytest.mark.parametrize("op", [ops.paged_attention, ops.paged_decode, ops.flash_attention])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 264}, r"head_dim is 264, and at most 256 fits; use --attention torch"),
        ({"dtype": torch.int32}, r"float32, float16 and bfloat16; use --\w+ torch"),
        ({"dtype": torch.float64}, r"float32, float16 and bfloat16; use --\w+ torch"),
        ({"heads": 5}, r"do not fit; use --attention torch"),
        ({"key_dim": 32}, r"do not fit; use --attention torch"),
        ({"key_dtype": FP32}, r"torch.float16 .* beside torch.float32 .*; use --\w+ torch"),
    ],
)
def test_a_refusal_names_the_fallback(op, change, message):
    shape = {"heads": 4, "head_dim": 64, "dtype": FP16} | change
    q = torch.zeros(1, shape["heads"], shape["head_dim"], dtype=shape["dtype"], device=DEVICE)
    keys = torch.zeros(
        32, 2, shape.get("key_dim", shape["head_dim"]), dtype=shape.get("key_dtype", shape["dtype"]), device=DEVICE
    )
    rows = (torch.zeros(1, 1, dtype=torch.int64), 16, torch.tensor([3]), torch.tensor([0, 1]))

    with pytest.raises(ValueError, match=message):
        op(q, keys, keys, *(x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in rows), 0.125)


# In full size, with what only a GPU has. Shapes of Qwen3-0.6B, so that Triton compiles little.

QWEN3 = {"head_dim": 128, "group": 2, "kv_heads": 8}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("batch", "longest"), [(1, 32_768), (1, 1), (2, 32_001), (16, 1024), (64, 517), (100, 300), (256, 1024), (256, 3)]
)
def test_decodes_of_one_sequence_or_many(batch, longest):
    paged = scene(decodes(*(max(1, longest - 7 * i % longest) for i in range(batch))), **QWEN3)

    paged.check(ops.paged_attention(*paged.arguments, max_queries=1))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "spans", [[(300, 32_768), (1, 31_999)], chunks(2048, 2047, 1), [(1, 700)] * 60 + chunks(513, 5)]
)
def test_long_chunks_beside_decodes(spans):
    paged = scene(spans, **QWEN3)

    paged.check(ops.paged_attention(*paged.arguments))


@pytest.mark.gpu
@needs_gpu
def test_offsets_beyond_32_bits():
    """In the last pages of a pool of more than 2^31 elements of K, and as many of V."""
    if torch.cuda.mem_get_info()[0] < 20e9:
        pytest.skip("needs 20 GB of free GPU memory")
    paged = scene([(1, 500), (100, 130)], **QWEN3, first_page=2**31 // (16 * 8 * 128))

    assert paged.keys.numel() > 2**31
    paged.check(ops.paged_attention(*paged.arguments))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlapping"])
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (decodes(40, 300), decodes(301, 17)),
        (decodes(*range(20, 480, 24)), decodes(*range(476, 0, -24))),
        ([(30, 100), (1, 300)], [(5, 5), (26, 290)]),
    ],
    ids=["decodes", "many decodes", "mixed"],
)
def test_a_captured_launch_follows_lengths_and_page_tables(first, then, overlap):
    paged, changed = scene(first, **QWEN3), scene(then, **QWEN3, seed=1)
    longest = max(new for new, _ in first)
    ops.paged_attention(*paged.arguments, max_queries=longest)  # Triton compiles at the first launch
    graph = torch.cuda.CUDAGraph()
    with overlapping(overlap):
        ops.paged_attention(*paged.arguments, max_queries=longest)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = ops.paged_attention(*paged.arguments, max_queries=longest)

    graph.replay()
    paged.check(out)
    for name in ("q", "keys", "values", "page_table", "kv_lens", "query_starts"):
        getattr(paged, name).copy_(getattr(changed, name))
    out.fill_(torch.nan)
    graph.replay()
    changed.check(out)


@pytest.mark.gpu
@needs_gpu
def test_a_graph_does_not_rely_on_another_that_was_captured_before_it():
    """Two launches are captured on one stream and only the second is replayed, in memory that held something else."""
    paged = scene(decodes(40, 300), **QWEN3)
    ops.paged_attention(*paged.arguments, max_queries=1)
    stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    garbage, unused, graph = (torch.cuda.CUDAGraph() for _ in range(3))
    with torch.cuda.graph(garbage, pool, stream):
        memory = torch.full((2**20,), 7, dtype=torch.int32, device=DEVICE)
    garbage.replay()
    torch.cuda.synchronize()
    del memory
    for captured in (unused, graph):
        with torch.cuda.graph(captured, pool, stream):
            out = ops.paged_attention(*paged.arguments, max_queries=1)

    graph.replay()
    paged.check(out)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("queries", [1, 9])
def test_it_launches_on_the_current_stream_and_waits_for_nothing(queries):
    paged = scene([(queries, 1000)] * 2, **QWEN3)
    ops.paged_attention(*paged.arguments, max_queries=queries)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ops.paged_attention(*paged.arguments, max_queries=queries)
        torch.cuda._sleep(200_000_000)
        out = ops.paged_attention(*paged.arguments, max_queries=queries)
        assert not stream.query()
    stream.synchronize()

    paged.check(out)


def test_a_first_launch_inside_a_graph_is_refused_since_the_counters_would_be_the_graphs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    with pytest.raises(RuntimeError, match="call paged_decode once before a CUDA graph captures it"):
        decode._arrivals.__wrapped__(torch.device("cuda"))
