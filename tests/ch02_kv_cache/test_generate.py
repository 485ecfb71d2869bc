"""Task 02.3: `cached_generate` gives the tokens of `naive_generate` and computes each of them once."""

from __future__ import annotations

import pytest
import torch

from minisgl.core import SamplingParams, WorkCounts
from minisgl.kvcache.contiguous import CacheFull, ContiguousCache
from minisgl.simple import cached_generate, naive_generate
from tests.helpers import tiny_model

PROMPT = [5, 17, 3, 3, 29, 11, 23, 41, 7]


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "Qwen3ForCausalLM"])
def model(request):
    return tiny_model(architecture=request.param)


def generate(model, prompt, params, work=None) -> list[int]:
    try:
        return list(cached_generate(model, prompt, params, work))
    except CacheFull as error:
        pytest.fail(
            f"the region was too small for what was fed: {error}. Either it has too few slots (one for each token that "
            "goes through the model), or a token was fed twice: a step takes only the tokens the cache does not hold"
        )


def assert_same(actual: list[int], expected: list[int]) -> None:
    for i, (a, e) in enumerate(zip(actual, expected, strict=False)):
        where = "the prefill" if i == 0 else f"decode step {i}"
        assert a == e, (
            f"new token {i} comes from {where} and is {a}; without a cache it is {e}. A step takes the tokens that are "
            "not stored yet, and their first position is the number of stored ones"
        )
    assert len(actual) == len(expected), f"{len(actual)} tokens in place of {len(expected)}"


@pytest.mark.parametrize("prompt_length", [1, 2, 9])
@pytest.mark.parametrize("max_tokens", [1, 2, 24])
def test_greedy_tokens_are_those_of_the_naive_engine(model, prompt_length, max_tokens):
    prompt, params = PROMPT[:prompt_length], SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    assert_same(generate(model, prompt, params), list(naive_generate(model, prompt, params)))


def test_sampled_tokens_with_a_seed_are_those_of_the_naive_engine(model):
    params = SamplingParams(max_tokens=24, temperature=1.0, top_k=20, seed=3, ignore_eos=True)
    assert_same(generate(model, PROMPT, params), list(naive_generate(model, PROMPT, params)))


@pytest.mark.parametrize("max_tokens", [1, 2, 10])
def test_each_token_is_computed_once_and_the_last_one_never(model, max_tokens):
    work = WorkCounts()
    generate(model, PROMPT, SamplingParams(max_tokens=max_tokens, ignore_eos=True), work)

    fed = len(PROMPT) + max_tokens - 1
    assert work.tokens_computed == fed, (
        f"{len(PROMPT)} prompt tokens and {max_tokens} new ones need {fed} rows, for nobody reads what follows "
        f"the last token; {work.tokens_computed} were computed"
    )
    assert work.steps == max_tokens, "one prefill, then one decode for each further token"


@pytest.mark.parametrize("max_tokens", [1, 10])
def test_a_slot_is_reserved_for_each_token_that_is_fed_and_no_other(model, max_tokens, monkeypatch):
    capacities = set()
    forward = ContiguousCache.forward

    def observed(cache, *args):
        capacities.add(cache.kv.shape[2])
        return forward(cache, *args)

    monkeypatch.setattr(ContiguousCache, "forward", observed)
    generate(model, PROMPT, SamplingParams(max_tokens=max_tokens, ignore_eos=True))

    fed = len(PROMPT) + max_tokens - 1
    assert capacities == {fed}, (
        f"{len(PROMPT)} prompt tokens and {max_tokens} new ones need one cache of {fed} slots, for the last token is "
        f"never fed back; reserved: {sorted(capacities)}"
    )


def test_kv_bytes_follow_the_formula(model):
    work = WorkCounts()
    generate(model, PROMPT, SamplingParams(max_tokens=4, ignore_eos=True), work)

    config = model.config
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * model.dtype.itemsize
    assert work.kv_bytes_written == per_token * (9 + 1 + 1 + 1), "hand `work` to the cache, so that it can count"
    assert work.kv_bytes_read == per_token * (9 + 10 + 11 + 12)


def test_the_end_of_sequence_token_is_yielded_once_and_ends_the_sequence(model):
    free = list(naive_generate(model, PROMPT, SamplingParams(max_tokens=24, ignore_eos=True)))
    stop_at = max(free[:-1], key=free.index)  # first seen as late as possible, with more to come
    ending = tiny_model(architecture=model.config.architecture, eos_token_ids=(stop_at,))

    work = WorkCounts()
    tokens = generate(ending, PROMPT, SamplingParams(max_tokens=24), work)

    before = free[: free.index(stop_at)]
    assert_same(tokens[: len(before)], before)
    assert tokens[len(before) :] == [stop_at], "stop after the end-of-sequence token, which is part of the answer"
    assert work.tokens_computed == len(PROMPT) + len(tokens) - 1, "nothing is computed after the end"


def test_generation_stops_where_the_context_ends(model):
    short = tiny_model(architecture=model.config.architecture, max_position_embeddings=len(PROMPT) + 3)
    params = SamplingParams(max_tokens=1000, ignore_eos=True)
    tokens = generate(short, PROMPT, params)
    assert len(tokens) == 3
    assert_same(tokens, list(naive_generate(short, PROMPT, params)))


def test_the_prompt_is_left_as_it_was(model):
    prompt = list(PROMPT)
    generate(model, prompt, SamplingParams(max_tokens=3, ignore_eos=True))
    assert prompt == PROMPT


def test_tokens_are_yielded_as_they_come(model):
    work = WorkCounts()
    stream = cached_generate(model, PROMPT, SamplingParams(max_tokens=10, ignore_eos=True), work)
    next(stream)
    assert work.steps == 1, "the first token must be yielded right after the prefill"


@pytest.mark.parametrize("prompt", [[], [10**6], [-1]])
def test_a_prompt_that_cannot_be_run_is_refused_as_in_chapter_1(model, prompt):
    with pytest.raises(ValueError, match="prompt"):
        generate(model, prompt, SamplingParams(max_tokens=3))


def test_no_gradient_is_recorded(model):
    with torch.enable_grad():
        assert len(generate(model, PROMPT, SamplingParams(max_tokens=2, ignore_eos=True))) == 2
