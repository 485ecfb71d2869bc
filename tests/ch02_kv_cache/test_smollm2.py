"""On the course's real model: the cached engine writes what the naive one writes, with a fraction of the work."""

from __future__ import annotations

import pytest

from minisgl.core import SamplingParams, WorkCounts
from minisgl.simple import cached_generate, naive_generate


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_says_the_same_and_computes_each_token_once():
    from minisgl.config import EngineConfig
    from minisgl.llm import LLM

    llm = LLM(EngineConfig.chapter(2, dtype="float32", device="cpu"))
    prompt = llm.encode([{"role": "user", "content": "Name three rivers."}])
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    naive_work, cached_work = WorkCounts(), WorkCounts()

    expected = list(naive_generate(llm.model, prompt, params, naive_work))
    actual = list(cached_generate(llm.model, prompt, params, cached_work))

    assert actual == expected
    assert cached_work.steps == naive_work.steps == 16
    assert cached_work.tokens_computed == len(prompt) + 15
    assert naive_work.tokens_computed == sum(len(prompt) + i for i in range(16))
    assert cached_work.kv_bytes_written == 46_080 * cached_work.tokens_computed  # fp32: 2 · 30 · 3 · 64 · 4
