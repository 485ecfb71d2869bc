"""Decode attention in CUDA C++ on a GPU: the grid of shapes and lengths, large pools, graphs."""

from __future__ import annotations

import pytest
import torch
from minisgl_kernels import cuda

from tests.kernels.cuda_cases import Paged
from tests.tolerances import CUDA_DECODE

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HEAD_DIMS, GROUPS = [64, 80, 96, 128, 256], [1, 2, 3, 4, 8]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(autouse=True)
def runs_here():
    if reason := cuda.why_unavailable(torch.device("cuda"), torch.float16):
        pytest.skip(reason)


def skip_unless_supported(dtype):
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("no bfloat16 on this GPU")


def check(paged, window=0, **options):
    paged.check(cuda.paged_decode, window, **options)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_backend_in_every_shape(head_dim, group):
    dtype = DTYPES[(HEAD_DIMS.index(head_dim) + GROUPS.index(group)) % 3]
    skip_unless_supported(dtype)
    for page_size in (1, 16, 64, 256):
        for lens in ([1], [page_size, page_size + 1, max(1, page_size - 1)], [2049, 100, 31, 33, 700]):
            check(Paged(lens, dtype, page_size, group, head_dim=head_dim, device="cuda"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", list(cuda.STEPS))
def test_every_step(step, dtype):
    skip_unless_supported(dtype)
    for head_dim, group in ((128, 2), (80, 3)):
        for page_size, lens in [(1, [1, 130]), (16, [31, 32, 33, 1000]), (256, [255, 257])]:
            paged = Paged(lens, dtype, page_size, group, head_dim=head_dim, device="cuda")
            check(paged, step=step)
            check(paged, 50, step=step)


@pytest.mark.parametrize(("batch", "length"), [(1, 32768), (2, 32001), (16, 1024), (64, 517), (256, 1024), (256, 3)])
def test_the_backend_from_one_sequence_to_many(batch, length):
    lens = [max(1, length - 7 * i % length) for i in range(batch)]
    paged = Paged(lens, torch.float16, kv_heads=8, head_dim=128, device="cuda")
    for num_splits in (0, 1, 5):
        check(paged, num_splits=num_splits)


def test_offsets_do_not_overflow_32_bits():
    """The last slots of a pool with more than 2^31 elements; it takes 9 GB."""
    if torch.cuda.mem_get_info()[0] < 12e9:
        pytest.skip("needs 12 GB of GPU memory")
    slots = 2**31 // (8 * 128) + 4096
    paged = Paged([100], torch.float16, page_size=1, kv_heads=8, head_dim=128, device="cuda")
    pool = [torch.full((slots, 8, 128), torch.nan, dtype=torch.float16, device="cuda") for _ in range(2)]
    moved = slots - 1 - torch.arange(100, device="cuda")
    for old, new in zip((paged.keys, paged.values), pool, strict=True):
        new[moved] = old[paged.rows[0]]
    paged.keys, paged.values, paged.rows, paged.page_table[0, :100] = *pool, [moved], moved
    for step in cuda.STEPS:
        check(paged, step=step)


def test_a_captured_launch_follows_the_lengths():
    paged = Paged([40, 300], torch.float16, head_dim=128, device="cuda")
    shorter = torch.tensor([17, 123], device="cuda")
    out = torch.empty_like(paged.q)
    rows = (paged.page_table, paged.page_size, paged.kv_lens, paged.query_starts)

    def launch():
        cuda.paged_decode(paged.q, paged.keys, paged.values, *rows, paged.scale, out=out, num_splits=4)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    paged.kv_lens.copy_(shorter)
    paged.lens, paged.rows = [17, 123], [paged.rows[0][:17], paged.rows[1][:123]]
    out.fill_(torch.nan)
    graph.replay()

    CUDA_DECODE[out.dtype].check(out.double(), paged.expected())


def test_it_launches_on_the_current_stream_and_waits_for_nothing():
    paged = Paged([1000] * 8, torch.float16, head_dim=128, device="cuda")
    expected = paged.run(cuda.paged_decode)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        out = paged.run(cuda.paged_decode)
        assert not stream.query()
    stream.synchronize()

    assert torch.equal(out, expected)
