"""Task 03.6: `TorchAttention.forward` stores this step's K and V, then attends over pages."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from minisgl.attention.torch_backend import TorchAttention
from minisgl.core import ForwardBatch, WorkCounts
from minisgl.kvcache.contiguous import ContiguousCache
from minisgl.kvcache.mha_pool import MHAPool
from tests.ch03_paged_pool.scene import Sequence, nan_pool, rows_of, sequences

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 6, 2, 10
ATOL = {torch.float32: 1e-5, torch.bfloat16: 3e-2}  # sums in another order; values near 1
MIXED = [(1, 17), (6, 6), (1, 18), (3, 12), (1, 2), (3, 30), (1, 20)]


@dataclass
class Step:
    """A step, its pool with everything stored but the new tokens, and each sequence's whole q, k and v by layer."""

    step: list[Sequence]
    pool: MHAPool
    q: list[list[torch.Tensor]]  # [layer][sequence], [total, heads, head_dim]
    k: list[list[torch.Tensor]]
    v: list[list[torch.Tensor]]

    def new(self, of: list[torch.Tensor]) -> torch.Tensor:
        """The rows of the step's new tokens, one sequence behind the other."""
        return torch.cat([x[-s.new :] for x, s in zip(of, self.step, strict=True)])

    def run(self, work: WorkCounts | None = None) -> list[torch.Tensor]:
        """What the backend returns in each layer."""
        backend = TorchAttention(self.pool, rows_of(self.step), work)
        batch = ForwardBatch(torch.zeros(1), torch.zeros(1), backend)
        news = [[self.new(x[layer]) for x in (self.q, self.k, self.v)] for layer in range(LAYERS)]
        return [backend.forward(*qkv, layer, batch) for layer, qkv in enumerate(news)]


def make(spans: list[tuple[int, int]], page_size: int, dtype: torch.dtype = torch.float32) -> Step:
    generator = torch.Generator().manual_seed(1)
    step = sequences(spans, page_size)
    pool = nan_pool(step, LAYERS, KV_HEADS, HEAD_DIM, dtype)

    def random(heads: int) -> list[list[torch.Tensor]]:
        shapes = [(s.total, heads, HEAD_DIM) for s in step]
        return [[torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for _ in range(LAYERS)]

    q, k, v = random(HEADS), random(KV_HEADS), random(KV_HEADS)
    for layer in range(LAYERS):
        for i, s in enumerate(step):
            for position, slot in enumerate(s.slots[: s.total - s.new]):
                place = divmod(slot, page_size)
                pool.kv[layer, 0][place], pool.kv[layer, 1][place] = k[layer][i][position], v[layer][i][position]
    return Step(step, pool, q, k, v)


def by_chapter_2(scene: Step, layer: int, i: int) -> torch.Tensor:
    """The new rows of sequence i from a contiguous cache of its own."""
    s, k, v = scene.step[i], scene.k[layer][i], scene.v[layer][i]
    cache = ContiguousCache(1, KV_HEADS, HEAD_DIM, s.total, k.dtype, torch.device("cpu"))
    batch = ForwardBatch(torch.zeros(1), torch.zeros(1), cache)
    before = s.total - s.new
    cache.append(0, k[:before], v[:before])
    return cache.forward(scene.q[layer][i][before:], k[before:], v[before:], 0, batch)


def check(scene: Step) -> None:
    outputs = scene.run()
    for layer, out in enumerate(outputs):
        assert out.shape == scene.new(scene.q[layer]).shape
        assert out.dtype == scene.q[layer][0].dtype
        parts = out.split([s.new for s in scene.step])
        for i, (s, part) in enumerate(zip(scene.step, parts, strict=True)):
            expected = by_chapter_2(scene, layer, i)
            error = float((part.double() - expected.double()).abs().max())
            assert error <= ATOL[out.dtype], (
                f"layer {layer}, sequence {i} ({s.new} new of {s.total} tokens, pages {s.pages}): off by {error:.2g} "
                "from the contiguous cache (nan: a slot was read that holds nothing)"
            )


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_prompts_chunks_and_decodes_in_one_step_are_what_each_would_be_alone(page_size):
    check(make(MIXED, page_size))


@pytest.mark.parametrize("page_size", [3, 16])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_lengths_at_the_boundary_of_a_page(page_size, offset):
    total = 2 * page_size + offset
    check(make([(1, total), (1, total + 1), (total, total), (2, total)], page_size))


@pytest.mark.parametrize("spans", [[(1, 5)], [(5, 5)], [(1, 1)], [(1, 6), (1, 6)], [(1, 7), (1, 4)], [(4, 9), (1, 3)]])
def test_small_steps(spans):
    check(make(spans, page_size=3))


def test_rows_come_back_in_the_order_of_the_step_not_of_the_groups():
    check(make([(1, 40), (1, 3), (1, 41), (1, 2), (2, 9), (1, 39)], page_size=4))


def test_16_bits_in_16_bits_out():
    check(make(MIXED, page_size=4, dtype=torch.bfloat16))


def test_the_new_tokens_are_in_the_pool_afterwards_in_every_layer():
    scene = make(MIXED, page_size=3)
    scene.run()
    for layer in range(LAYERS):
        for i, s in enumerate(scene.step):
            for position, slot in enumerate(s.slots):
                place = divmod(slot, 3)
                assert torch.equal(scene.pool.kv[layer, 0][place], scene.k[layer][i][position])
                assert torch.equal(scene.pool.kv[layer, 1][place], scene.v[layer][i][position])


def test_what_lies_in_other_pages_does_not_matter():
    scene, other = make(MIXED, page_size=3), make(MIXED, page_size=3)
    other.pool.kv[:] = torch.where(other.pool.kv.isnan(), 1e30, other.pool.kv)
    for mine, theirs in zip(scene.run(), other.run(), strict=True):
        assert torch.equal(mine, theirs), "the output depends on a slot that belongs to nobody in this step"


def test_no_input_is_changed():
    scene = make(MIXED, page_size=3)
    backend = TorchAttention(scene.pool, rows_of(scene.step))
    qkv = [scene.new(x[0]) for x in (scene.q, scene.k, scene.v)]
    copies = [x.clone() for x in qkv]
    backend.forward(*qkv, 0, ForwardBatch(torch.zeros(1), torch.zeros(1), backend))
    for name, x, copy in zip("qkv", qkv, copies, strict=True):
        assert torch.equal(x, copy), f"{name} was changed in place"


def test_bytes_written_and_read_are_counted():
    work, scene = WorkCounts(), make([(1, 4), (1, 7), (3, 9), (1, 40)], page_size=4)
    scene.run(work)
    token = 2 * KV_HEADS * HEAD_DIM * 4 * LAYERS  # K and V, fp32
    assert work.kv_bytes_written == token * 6, "6 tokens are new"
    assert work.kv_bytes_read == token * (7 + 7 + 9 + 40), (
        "what is gathered is read, padding included: the decodes of 4 and 7 tokens share a group of 7"
    )
