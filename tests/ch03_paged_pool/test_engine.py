"""All tasks together: the engine of chapter 3 serves many requests at once and writes what `naive_generate` writes."""

from __future__ import annotations

import pytest

from minisgl.config import EngineConfig
from minisgl.core import Request, SamplingParams
from minisgl.engine.engine import Engine
from minisgl.simple import naive_generate
from tests.helpers import tiny_model

PROMPTS = [
    [i * step % 90 + 5 for i in range(length)] for step, length in [(7, 1), (11, 16), (13, 15), (17, 33), (3, 17)]
]
ANSWERS = [12, 20, 1, 7, 17]
MODELS = {name: tiny_model(architecture=name) for name in ("LlamaForCausalLM", "Qwen3ForCausalLM")}


def requests() -> list[Request]:
    return [
        Request(i, list(prompt), SamplingParams(max_tokens=n, ignore_eos=True))
        for i, (prompt, n) in enumerate(zip(PROMPTS, ANSWERS, strict=True))
    ]


def run(model, **config) -> tuple[Engine, list[list[int]]]:
    """All prompts at once, over a pool whose unused slots hold NaN."""
    engine = Engine(model, EngineConfig.chapter(3, **config))
    engine.pool.kv[:, :, 1:] = float("nan")
    served = requests()
    for request in served:
        engine.add(request)
    while engine.has_work:
        engine.step()
    assert [request.error for request in served] == [""] * len(served)
    return engine, [request.output for request in served]


def expected(model) -> list[list[int]]:
    return [list(naive_generate(model, request.tokens, request.params)) for request in requests()]


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_several_prompts_at_once_get_the_tokens_that_each_would_get_alone(architecture, page_size):
    model = MODELS[architecture]
    engine, answers = run(model, page_size=page_size, kv_pages=256 // page_size)
    for i, (actual, right) in enumerate(zip(answers, expected(model), strict=True)):
        assert actual == right, f"prompt {i} of {len(PROMPTS[i])} tokens is answered otherwise than alone"
    assert engine.pages.num_free == engine.pages.capacity, "all have ended, and pages are still held"


def test_pages_are_used_again_where_the_pool_is_smaller_than_all_requests_together():
    model = MODELS["LlamaForCausalLM"]
    needed = sum(-(-(len(p) + n - 1) // 4) for p, n in zip(PROMPTS, ANSWERS, strict=True))
    engine, answers = run(model, page_size=4, kv_pages=needed // 2)
    assert answers == expected(model)
    assert engine.pages.num_free == engine.pages.capacity


def test_one_page_as_large_as_the_context_makes_contiguous_regions():
    model = MODELS["LlamaForCausalLM"]
    _, answers = run(model, max_model_len=64, page_size=64, kv_pages=3)
    assert answers == expected(model)


def test_prompts_chunks_and_decodes_go_through_the_model_side_by_side():
    model = MODELS["LlamaForCausalLM"]
    _, answers = run(model, page_size=4, kv_pages=64, batching="mixed", max_batch_tokens=9)
    assert answers == expected(model)


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_answers_three_at_once_as_one_after_another():
    from minisgl.llm import LLM

    llm = LLM(EngineConfig.chapter(3, dtype="float32", device="cpu", kv_pages=40, max_model_len=512))
    questions = ["Name three rivers.", "What is 2 + 2?", "Write a line about the sea, the wind and the light."]
    prompts = [llm.encode([{"role": "user", "content": question}]) for question in questions]
    params = SamplingParams(max_tokens=8, ignore_eos=True)

    answers = [completion.token_ids for completion in llm.generate(prompts, params)]

    assert answers == [list(naive_generate(llm.model, prompt, params)) for prompt in prompts]
