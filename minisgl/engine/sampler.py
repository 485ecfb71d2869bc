"""The next token of many requests at once, each by its own parameters.

A row's choice depends on its logits, its parameters, its seed and its position, and on nothing else: not on its
neighbours, its row or the device. So a preempted request goes on where it was. `engine.sample` says the same for one
row, step by step.
"""

from collections import Counter
from collections.abc import Sequence

import minisgl_kernels as ops
import numpy as np
import torch

from minisgl.core import Request, TokenLogprobs


def sample_rows(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    """Choose a token for each row of logits [B, vocab]; -1 where they hold NaN.

    Requests that want logprobs get them appended.
    """
    raw = logits.float()
    logits = adjust(raw, requests)
    best, tokens = logits.max(dim=-1)
    drawn = [i for i, request in enumerate(requests) if request.params.temperature > 0]
    if drawn:
        tokens[drawn] = draw(logits if len(drawn) == len(requests) else logits[drawn], [requests[i] for i in drawn])
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
            banned = [token for token in request.stop_ids if 0 <= token < logits.shape[1]]
            added_at += [(i, token) for token in banned]
            added += [float("-inf")] * len(banned)
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


def draw(logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """Draw a token from each row of logits [B, vocab], whose requests have temperatures above 0; returns ids [B]."""
    each = [request.params for request in requests]
    columns = [(p.temperature, p.top_k, p.top_p, p.min_p) for p in each]
    uniform = uniform_at([request.seed for request in requests], [len(request.tokens) for request in requests])
    values = torch.cat([torch.tensor(columns), uniform.unsqueeze(1)], dim=1).to(logits.device)  # one copy
    temperature, top_k, top_p, min_p, uniform = values.unbind(1)
    filtered = any(p.top_k or p.top_p < 1 or p.min_p for p in each)
    probs = (logits - logits.max(dim=-1, keepdim=True).values).div_(temperature.unsqueeze(1)).softmax(dim=-1)
    return ops.sample(probs, uniform, top_k, top_p, min_p) if filtered else ops.sample(probs, uniform)


def uniform_at(seeds: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """An fp32 number in (0, 1] for each seed and position, counted and not drawn (SplitMix64, Steele et al., 2014)."""
    x = np.array(seeds, dtype=np.uint64) + np.array(positions, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    x ^= x >> np.uint64(31)
    return torch.from_numpy(((x >> np.uint64(40)) + np.uint64(1)).astype(np.float32) / 2**24)


def _append_logprobs(logits: torch.Tensor, requests: Sequence[Request], chosen: list[int]) -> None:
    """Logprobs of the chosen and the most probable tokens, from the model's own logits [B, vocab]."""
    asking = [i for i, request in enumerate(requests) if request.params.logprobs is not None and chosen[i] >= 0]
    if not asking:
        return
    logprobs = logits[asking].log_softmax(dim=-1)
    most = max(requests[i].params.logprobs or 0 for i in asking)
    values, ids = logprobs.topk(min(most, logits.shape[-1]), dim=-1)
    own = logprobs.gather(1, torch.tensor([[chosen[i]] for i in asking], device=logits.device))
    for i, top, top_ids, [value] in zip(asking, values.tolist(), ids.tolist(), own.tolist(), strict=True):
        k = requests[i].params.logprobs
        requests[i].logprobs.append(TokenLogprobs(chosen[i], value, dict(zip(top_ids[:k], top[:k], strict=True))))
