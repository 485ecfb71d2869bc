"""Tasks 02.1 and 02.2 together: however a sequence is cut into steps, the logits are those of the whole."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.core import WorkCounts
from minisgl.simple import Recompute, new_cache, step
from tests.helpers import tiny_model
from tests.tolerances import TINY_LOGITS

PROMPT = [5, 17, 3, 3, 29, 11, 23, 2, 41, 7, 13, 31, 37, 5, 19, 3, 43, 47, 6, 9, 22, 28, 35]
MODELS = {name: tiny_model(architecture=name) for name in ("LlamaForCausalLM", "Qwen3ForCausalLM")}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return MODELS[request.param]


@torch.inference_mode()
def whole(model, tokens: list[int]) -> torch.Tensor:
    return step(model, tokens, 0, Recompute(), WorkCounts())


@torch.inference_mode()
def check_cut(model, sizes: list[int], capacity: int) -> WorkCounts:
    """Feed PROMPT in chunks of these sizes and compare the last logits of each with a recomputation."""
    work = WorkCounts()
    cache = new_cache(model, capacity, work)
    cache.kv.fill_(float("nan"))  # a slot that is read before it is written shows
    position = 0
    for size in sizes:
        logits = step(model, PROMPT[position : position + size], position, cache, work)
        position += size
        torch.testing.assert_close(
            logits,
            whole(model, PROMPT[:position]),
            rtol=TINY_LOGITS.rtol,
            atol=TINY_LOGITS.atol,
            msg=lambda diff, end=position: (
                f"PROMPT cut into {sizes}: after token {end} the logits are not those of the whole sequence: {diff}"
            ),
        )
    return work


@st.composite
def cuts(draw: st.DrawFn) -> list[int]:
    """Sizes of consecutive chunks that cover PROMPT."""
    edges = draw(st.sets(st.integers(1, len(PROMPT) - 1)))
    points = [0, *sorted(edges), len(PROMPT)]
    return [end - start for start, end in itertools.pairwise(points)]


@pytest.mark.parametrize("architecture", MODELS)
@settings(max_examples=15, deadline=None)
@given(sizes=cuts(), spare=st.integers(0, 3))
def test_any_cut_gives_the_same_logits(architecture, sizes, spare):
    check_cut(MODELS[architecture], sizes, capacity=len(PROMPT) + spare)


@pytest.mark.parametrize("sizes", [[23], [1] * 23, [22, 1], [1, 22], [11, 12]])
def test_each_token_is_computed_once_and_written_once(model, sizes):
    work = check_cut(model, sizes, capacity=len(PROMPT))
    config = model.config
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * model.dtype.itemsize
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    assert work.steps == len(sizes)
    assert work.tokens_computed == len(PROMPT)
    assert work.kv_bytes_written == per_token * len(PROMPT)
    assert work.kv_bytes_read == per_token * sum(ends), "each step reads everything stored so far, once"


def test_two_caches_do_not_share_anything(model):
    first, second = (new_cache(model, len(PROMPT)) for _ in range(2))
    work = WorkCounts()
    with torch.inference_mode():
        step(model, PROMPT[:9], 0, first, work)
        step(model, PROMPT[10:15], 0, second, work)
        logits = step(model, PROMPT[9:12], 9, first, work)
    TINY_LOGITS.check(logits, whole(model, PROMPT[:12]))
