"""The next token of many requests at once, each by its own parameters.

A row's choice depends on its logits, its parameters, its seed and its position, and on nothing else: not on its
neighbours, its row or the device. So a preempted request goes on where it was. `engine.sample` says the same for one
row, step by step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from minisgl.core import Request, SamplingParams, TokenLogprobs


def sample_rows(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    """Choose a token for each row of logits [B, vocab]; -1 where they hold NaN.

    Requests that want logprobs get them appended.
    """
    raw = logits.float()
    logits = adjust(raw, requests)
    best, tokens = logits.max(dim=-1)
    drawn = [i for i, request in enumerate(requests) if request.params.temperature > 0]
    if drawn:
        uniform = uniform_at([requests[i].seed for i in drawn], [len(requests[i].tokens) for i in drawn])
        rows = logits if len(drawn) == len(requests) else logits[drawn]
        tokens[drawn] = draw(rows, [requests[i].params for i in drawn], uniform.to(logits.device))
    chosen: list[int] = tokens.masked_fill(best.isnan(), -1).tolist()
    _append_logprobs(raw, requests, chosen)
    return chosen


def adjust(logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """Apply penalties, logit_bias and min_tokens to logits [B, vocab], which stay as they are.

    The repetition penalty divides positive logits and multiplies negative ones (CTRL); all else is added to the logits.
    """
    seen_at, divisors = list[tuple[int, int]](), list[float]()
    added_at, added = list[tuple[int, int]](), list[float]()
    for i, request in enumerate(requests):
        params = request.params
        if params.repetition_penalty != 1:
            seen = set(request.tokens)
            seen_at += [(i, token) for token in seen]
            divisors += [params.repetition_penalty] * len(seen)
        if params.presence_penalty or params.frequency_penalty:
            counts = Counter(request.output)
            added_at += [(i, token) for token in counts]
            added += [-params.presence_penalty - params.frequency_penalty * count for count in counts.values()]
        added_at += [(i, token) for token in params.logit_bias]
        added += params.logit_bias.values()
        if len(request.tokens) - request.prompt_len < params.min_tokens:
            added_at += [(i, token) for token in request.stop_ids]
            added += [float("-inf")] * len(request.stop_ids)
    if not (seen_at or added_at):
        return logits
    logits = logits.clone()
    if seen_at:
        where = torch.tensor(seen_at, device=logits.device).unbind(1)
        values, by = logits[where], torch.tensor(divisors, device=logits.device)
        logits[where] = torch.where(values > 0, values / by, values * by)
    if added_at:
        where = torch.tensor(added_at, device=logits.device).unbind(1)
        logits.index_put_(where, torch.tensor(added, device=logits.device), accumulate=True)
    return logits


def draw(logits: torch.Tensor, params: Sequence[SamplingParams], uniform: torch.Tensor) -> torch.Tensor:
    """Draw from each row of logits [B, vocab] by inverting its cumulative distribution at uniform [B] in (0, 1].

    One number a row is enough, so that it can come from a counter; `torch.multinomial` would take one a token.
    """
    device, vocab = logits.device, logits.shape[-1]
    temperature = torch.tensor([[p.temperature] for p in params], device=device)
    probs = ((logits - logits.max(dim=-1, keepdim=True).values) / temperature).softmax(dim=-1)
    ids = None
    if any(p.top_k or p.top_p < 1 or p.min_p for p in params):
        probs, ids = probs.sort(dim=-1, descending=True, stable=True)
        top_k = torch.tensor([[p.top_k or vocab] for p in params], device=device)
        top_p = torch.tensor(
            [[p.top_p if p.top_p < 1 else 2.0] for p in params], device=device
        )  # 2: rounding cuts none
        min_p = torch.tensor([[p.min_p] for p in params], device=device)
        probs[torch.arange(vocab, device=device) >= top_k] = 0
        probs /= probs.sum(dim=-1, keepdim=True)
        probs[probs.cumsum(dim=-1) - probs >= top_p] = 0  # the token that crosses top_p stays
        probs[probs < min_p * probs[:, :1]] = 0
    cumulative = probs.cumsum(dim=-1)
    places = torch.searchsorted(cumulative, uniform.unsqueeze(1) * cumulative[:, -1:]).clamp(max=vocab - 1)
    return (places if ids is None else ids.gather(1, places)).squeeze(1)


def uniform_at(seeds: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """An fp32 number in (0, 1] for each seed and position, counted and not drawn (SplitMix64, Steele et al., 2014)."""
    x = np.array(seeds, dtype=np.uint64) + np.array(positions, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    x ^= x >> np.uint64(31)
    return torch.from_numpy(((x >> np.uint64(40)) + np.uint64(1)).astype(np.float32) / 2**24)


def _append_logprobs(logits: torch.Tensor, requests: Sequence[Request], chosen: list[int]) -> None:
    """Logprobs of the chosen and the most probable tokens, from the model's own logits [B, vocab]."""
    asking = [i for i, request in enumerate(requests) if request.params.logprobs is not None]
    if not asking:
        return
    logprobs = logits[asking].log_softmax(dim=-1)
    most = max(requests[i].params.logprobs or 0 for i in asking)
    values, ids = logprobs.topk(min(most, logits.shape[-1]), dim=-1)
    own = logprobs.gather(1, torch.tensor([[max(chosen[i], 0)] for i in asking], device=logits.device))
    for i, top, top_ids, [value] in zip(asking, values.tolist(), ids.tolist(), own.tolist(), strict=True):
        k = requests[i].params.logprobs
        requests[i].logprobs.append(TokenLogprobs(chosen[i], value, dict(zip(top_ids[:k], top[:k], strict=True))))
