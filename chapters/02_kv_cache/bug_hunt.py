"""An engine that reads its prompt in chunks, so that a long one needs less memory at once. It has one bug: find it.

Short prompts are answered as by `cached_generate`. After a long one the second token may be wrong; fluent text follows.
Run `pytest tests/ch02_kv_cache/test_bug_hunt.py --runxfail` to see the symptom, and again to see it gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from minisgl.core import SamplingParams, WorkCounts
from minisgl.engine.sample import new_generator, sample
from minisgl.models.llama import LlamaForCausalLM
from minisgl.simple import ends, new_cache, output_limit, step


@torch.inference_mode()
def chunked_generate(
    model: LlamaForCausalLM, prompt: Sequence[int], params: SamplingParams, chunk_tokens: int = 64
) -> Iterator[int]:
    """Like cached_generate, but the prefill takes at most chunk_tokens a step."""
    work = WorkCounts()
    limit = output_limit(model, prompt, params)
    generator = new_generator(params.seed, model.device)
    cache = new_cache(model, len(prompt) + limit - 1, work)
    for start in range(0, len(prompt), chunk_tokens):
        chunk = prompt[start : start + chunk_tokens]
        logits = step(model, chunk, start, cache, work)
    position = len(chunk)
    for remaining in range(limit - 1, -1, -1):
        token = sample(logits, params, generator)
        yield token
        if ends(model, token, params) or remaining == 0:
            return
        logits = step(model, [token], position, cache, work)
        position = cache.lengths[0]
