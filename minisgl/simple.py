"""The two simplest engines: one request, one token at a time. Every later engine must give the same greedy tokens.

Knows nothing of text; see `minisgl.llm` for that.
"""

from collections.abc import Iterator, Sequence

import minisgl_kernels as ops
import torch

from minisgl.core import AttentionBackend, ForwardBatch, SamplingParams, WorkCounts
from minisgl.engine.sample import new_generator, sample
from minisgl.kvcache.contiguous import ContiguousCache
from minisgl.models.llama import LlamaForCausalLM


class Recompute:
    """Attention without memory: the K and V of this step are all there is."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, batch: ForwardBatch
    ) -> torch.Tensor:
        """See core.AttentionBackend."""
        return ops.causal_attention(q, k, v, q.shape[-1] ** -0.5)


@torch.inference_mode()
def naive_generate(
    model: LlamaForCausalLM, prompt: Sequence[int], params: SamplingParams, work: WorkCounts | None = None
) -> Iterator[int]:
    """Yield new tokens one by one, running the whole sequence through the model for each.

    Stops after an end-of-sequence token (which is yielded, once), after params.max_tokens, or when the context is full.

    Raises:
        ValueError: the prompt is empty, holds an id outside the vocabulary, or leaves no room in the context.
    """
    work = work or WorkCounts()
    limit = output_limit(model, prompt, params)
    generator = new_generator(params.seed, model.device)
    tokens = list(prompt)
    for _ in range(limit):
        logits = step(model, tokens, 0, Recompute(), work)
        token = sample(logits, params, generator)
        yield token
        if ends(model, token, params):
            return
        tokens.append(token)


@torch.inference_mode()
def cached_generate(
    model: LlamaForCausalLM, prompt: Sequence[int], params: SamplingParams, work: WorkCounts | None = None
) -> Iterator[int]:
    """Like naive_generate, token for token, but each token goes through the model once.

    The first step is the prefill: the whole prompt, whose K and V fill the cache. Each later step is a decode: one row.
    """
    work = work or WorkCounts()
    limit = output_limit(model, prompt, params)
    generator = new_generator(params.seed, model.device)
    cache = new_cache(model, len(prompt) + limit - 1, work)  # the last token is never fed back
    new_tokens, position = list(prompt), 0
    for _ in range(limit):
        logits = step(model, new_tokens, position, cache, work)
        token = sample(logits, params, generator)
        yield token
        if ends(model, token, params):
            return
        position += len(new_tokens)
        new_tokens = [token]


def step(
    model: LlamaForCausalLM, tokens: Sequence[int], position: int, attention: AttentionBackend, work: WorkCounts
) -> torch.Tensor:
    """Run tokens, the first of which stands at `position`, through the model; logits [vocab] of the last one."""
    batch = ForwardBatch(
        input_ids=torch.tensor(tokens, device=model.device),
        positions=torch.arange(position, position + len(tokens), device=model.device),
        attention=attention,
        output_rows=torch.tensor([len(tokens) - 1], device=model.device),
    )
    logits = model(batch)
    work.steps += 1
    work.tokens_computed += len(tokens)
    return logits[0]


def new_cache(model: LlamaForCausalLM, capacity: int, work: WorkCounts | None = None) -> ContiguousCache:
    """An empty cache of the model's shape, dtype and device, with room for `capacity` tokens."""
    config = model.config
    return ContiguousCache(
        config.num_layers, config.num_kv_heads, config.head_dim, capacity, model.dtype, model.device, work
    )


def ends(model: LlamaForCausalLM, token: int, params: SamplingParams) -> bool:
    """Whether this token is the sequence's last word."""
    return token in model.config.eos_token_ids and not params.ignore_eos


def output_limit(model: LlamaForCausalLM, prompt: Sequence[int], params: SamplingParams) -> int:
    """How many tokens may follow the prompt: params.max_tokens, or what the context still holds if that is less."""
    context, vocab = model.config.max_position_embeddings, model.config.vocab_size
    if not prompt:
        raise ValueError("the prompt is empty: give at least one token")
    if len(prompt) >= context:
        raise ValueError(
            f"the prompt has {len(prompt):,} tokens, but this model's context is {context:,}: shorten the prompt"
        )
    if not 0 <= min(prompt) <= max(prompt) < vocab:
        raise ValueError(f"the prompt holds token ids outside 0 … {vocab - 1}: was it made by another tokenizer?")
    return min(params.max_tokens, context - len(prompt))
