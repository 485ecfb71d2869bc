"""What sampling needs the host for: penalties and biases before the choice, log-probabilities after it.

The choice itself is an op (`minisgl_kernels.reference.sample`). It depends on a row's logits, parameters, seed and
position, and on nothing else: not on its neighbours, its row or the device. So a preempted request goes on where it
was. `engine.sample` says the same for one row, step by step.
"""

from collections import Counter
from collections.abc import Sequence

import torch

from minisgl.core import Batch, Request, TokenLogprobs


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


def append_logprobs(logits: torch.Tensor, batch: Batch, chosen: list[int]) -> None:
    """Logprobs of the chosen and the most probable tokens, from the model's own logits [B, vocab].

    Only where a token was due: not behind an unfinished chunk, and not for NaN (-1).
    """
    requests = batch.requests
    asking = [
        i
        for i, (request, start, n) in enumerate(batch)
        if request.params.logprobs is not None and chosen[i] >= 0 and start + n >= len(request.tokens)
    ]
    if not asking:
        return
    logprobs = logits[asking].float().log_softmax(dim=-1)
    most = max(requests[i].params.logprobs or 0 for i in asking)
    values, ids = logprobs.topk(min(most, logits.shape[-1]), dim=-1)
    own = logprobs.gather(1, torch.tensor([[chosen[i]] for i in asking], device=logits.device))
    for i, top, top_ids, [value] in zip(asking, values.tolist(), ids.tolist(), own.tolist(), strict=True):
        k = requests[i].params.logprobs
        requests[i].logprobs.append(TokenLogprobs(chosen[i], value, dict(zip(top_ids[:k], top[:k], strict=True))))
