"""The engine of chapter 5 on a tiny model: greedy tokens are those of chapter 1's, for everybody at once. Needs all
tasks."""

from __future__ import annotations

import pytest
import torch

from minisgl.config import EngineConfig
from minisgl.core import Request, SamplingParams
from minisgl.engine.engine import Engine
from minisgl.simple import naive_generate
from tests.helpers import tiny_model

SHARED = [5, 17, 3, 3, 29, 11, 23, 41, 8, 13, 21]
PROMPTS = [SHARED[:7], [*SHARED, 40], [*SHARED, 41, 42], [9], SHARED, SHARED, list(range(50, 90)), [*SHARED, 40, 61]]
PARAMS = SamplingParams(max_tokens=10)


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "Qwen3ForCausalLM"])
def model(request):
    return tiny_model(architecture=request.param)


@pytest.fixture(scope="module")
def expected(model):
    return [list(naive_generate(model, prompt, PARAMS)) for prompt in PROMPTS]


def answers(model, every: int = 0, **switches) -> tuple[list[list[int]], Engine]:
    """All prompts through one engine; a new one comes every so many steps, or all at once."""
    engine = Engine(model, EngineConfig.chapter(5, max_model_len=64, **({"kv_pages": 40, "page_size": 4} | switches)))
    engine.pool.kv.fill_(float("nan"))  # what is read before it was written shows
    engine.pool.kv[:, :, 0] = 0
    requests = [Request(i, list(p), PARAMS, frozenset(model.config.eos_token_ids)) for i, p in enumerate(PROMPTS)]
    coming, steps = list(requests), 0
    while coming or engine.has_work:
        while coming and steps >= every * coming[0].id:
            engine.add(coming.pop(0))
        engine.step()
        steps += 1
        assert steps < 1000
    assert [request.finish_reason for request in requests if request.finish_reason not in ("stop", "length")] == []
    return [request.output for request in requests], engine


@pytest.mark.parametrize("batching", ["static", "prefill_first", "mixed"])
@pytest.mark.parametrize(("every", "budget"), [(0, 2048), (0, 7), (2, 16)])
def test_all_ways_of_batching_give_the_tokens_of_chapter_1(model, expected, batching, every, budget):
    actual, _ = answers(model, every, batching=batching, max_batch_tokens=budget)
    assert actual == expected


@pytest.mark.parametrize("prefix_cache", ["none", "radix"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_pool_that_is_too_small_for_all_costs_work_and_no_token(model, expected, page_size, prefix_cache):
    actual, engine = answers(
        model,
        max_batch_tokens=16,
        page_size=page_size,
        kv_pages=1 + 64 // page_size,
        output_reserve=0.0,
        prefix_cache=prefix_cache,
    )
    assert actual == expected
    assert engine.work.preemptions > 0, "the test means to run out of pages"


@torch.inference_mode()
def test_a_chunk_beside_decodes_gives_the_chunks_own_logits(model, expected):
    """One mixed step of a decode and two chunks, all of different lengths."""
    actual, engine = answers(model, every=3, max_batch_tokens=5, prefix_cache="none")
    assert actual == expected
    outputs = sum(len(tokens) for tokens in expected)
    computed = sum(map(len, PROMPTS)) + outputs - len(PROMPTS)  # the last token of an answer is never fed
    assert engine.work.tokens_computed == computed, "each token is computed once, however it was cut"


def test_an_abort_in_the_middle_leaves_the_others_alone(model, expected):
    engine = Engine(model, EngineConfig.chapter(5, max_model_len=64, kv_pages=40, page_size=4, max_batch_tokens=8))
    requests = [Request(i, list(p), PARAMS, frozenset(model.config.eos_token_ids)) for i, p in enumerate(PROMPTS)]
    for request in requests:
        engine.add(request)
    for _ in range(6):
        engine.step()
    engine.abort(6)  # its prompt of 40 tokens is being read
    while engine.has_work:
        engine.step()
    assert requests[6].finish_reason == "abort"
    assert [r.output for r in requests if r.id != 6] == [tokens for i, tokens in enumerate(expected) if i != 6]
