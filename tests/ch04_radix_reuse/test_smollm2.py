"""On the course's real model: a second question behind the same system prompt computes little and is answered alike."""

from __future__ import annotations

import pytest

from minisgl.core import SamplingParams
from minisgl.simple import cached_generate

SYSTEM = "You answer for a harbour office. Be brief. Berths one to nine are for boats of up to eight metres. " * 3


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_answers_alike_behind_a_shared_system_prompt():
    from minisgl.config import EngineConfig
    from minisgl.llm import LLM

    llm = LLM(EngineConfig.chapter(4, kv_pages=64, dtype="float32", device="cpu"))
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    for i, question in enumerate(["May I moor here?", "Which berth is mine?"]):
        system = {"role": "system", "content": SYSTEM}
        prompt = llm.encode([system, {"role": "user", "content": question}])
        [done] = llm.generate([prompt], params)
        assert done.token_ids == list(cached_generate(llm.model, prompt, params))
        assert (done.cached_tokens > 0.7 * len(prompt)) == (i == 1), "the second one finds the system prompt"
        assert done.cached_tokens % 16 == 0
    llm.close()
