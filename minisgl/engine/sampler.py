"""The next token of many requests at once, each by its own parameters.

A row's choice depends on its logits, its parameters, its seed and its position, and on nothing else: not on its
neighbours, its row or the device. So a preempted request goes on where it was. `engine.sample` says the same for one
row, step by step.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from minisgl_kernels import reference

from minisgl.core import Request, TokenLogprobs


def sample_rows(logits: torch.Tensor, requests: Sequence[Request], ops: Any = reference) -> list[int]:
    """Choose a token for each row of logits [B, vocab] with ops.sample; -1 where they hold NaN.

    Requests that want logprobs get them appended.
    """
    chosen: list[int] = ops.sample(adjust(logits, requests), *_parameters(requests, logits.device)).tolist()
    append_logprobs(logits, requests, chosen)
    return chosen


def adjust(logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """Apply penalties, logit_bias and min_tokens to logits [B, vocab], which stay as they are; what changes is fp32.

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
    logits = logits.to(torch.float32, copy=True)
    if seen_at:
        where = torch.tensor(seen_at, device=logits.device).unbind(1)
        values, by = logits[where], torch.tensor(divisors, device=logits.device)
        logits[where] = torch.where(values > 0, values / by, values * by)
    if added_at:
        where = torch.tensor(added_at, device=logits.device).unbind(1)
        logits.index_put_(where, torch.tensor(added, device=logits.device, dtype=logits.dtype), accumulate=True)
    return logits


def _parameters(requests: Sequence[Request], device: torch.device) -> list[torch.Tensor | None]:
    """What ops.sample needs to know of each row besides its logits, in one copy to the device.

    Filters that nobody asked for are None.
    """
    each = [request.params for request in requests]
    packed = np.zeros((5, len(each)), dtype=np.int64)  # three rows of 64 bits, then three of 32 bits in two
    packed[0], packed[1] = [request.seed for request in requests], [len(request.tokens) for request in requests]
    packed[2] = [p.top_k for p in each]
    packed[3:].view(np.float32).reshape(4, -1)[:3] = np.array([(p.temperature, p.top_p, p.min_p) for p in each]).T
    sent = torch.from_numpy(packed).to(device)
    seeds, positions, top_k = sent[:3].unbind()
    temperature, top_p, min_p, _ = sent[3:].view(torch.float32).view(4, -1).unbind()
    filtered = any(p.top_k or p.top_p < 1 or p.min_p for p in each)
    return [temperature, seeds, positions, *((top_k, top_p, min_p) if filtered else (None, None, None))]


def append_logprobs(logits: torch.Tensor, requests: Sequence[Request], chosen: list[int]) -> None:
    """Logprobs of the chosen and the most probable tokens, from the model's own logits [B, vocab]."""
    asking = [i for i, request in enumerate(requests) if request.params.logprobs is not None and chosen[i] >= 0]
    if not asking:
        return
    logprobs = logits[asking].float().log_softmax(dim=-1)
    most = max(requests[i].params.logprobs or 0 for i in asking)
    values, ids = logprobs.topk(min(most, logits.shape[-1]), dim=-1)
    own = logprobs.gather(1, torch.tensor([[chosen[i]] for i in asking], device=logits.device))
    for i, top, top_ids, [value] in zip(asking, values.tolist(), ids.tolist(), own.tolist(), strict=True):
        k = requests[i].params.logprobs
        requests[i].logprobs.append(TokenLogprobs(chosen[i], value, dict(zip(top_ids[:k], top[:k], strict=True))))
