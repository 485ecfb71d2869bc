"""From logits to the next token.

The filters come in the order of transformers: temperature, top-k, top-p, min-p.
"""

import torch

from minisgl.core import SamplingParams


def sampling_probs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution that a token is drawn from: logits [vocab] → probabilities [vocab] in fp32, summing to 1.

    Needs a temperature above 0. Ties are broken towards the smaller id, so top-k keeps exactly k tokens.
    """
    shifted = logits.float() - logits.max()  # the largest becomes 0: a tiny temperature cannot overflow
    probs, ids = (shifted / params.temperature).softmax(dim=-1).sort(descending=True, stable=True)
    if params.top_k:
        probs[params.top_k :] = 0
        probs /= probs.sum()
    if params.top_p < 1:
        mass_before = probs.cumsum(dim=-1) - probs
        probs[mass_before >= params.top_p] = 0  # the token that crosses top_p stays
    probs[probs < params.min_p * probs[0]] = 0
    return torch.zeros_like(probs).scatter(0, ids, probs / probs.sum())


def new_generator(seed: int | None, device: torch.device) -> torch.Generator:
    """A source of randomness of one's own, so that requests do not disturb each other; None draws a fresh seed."""
    generator = torch.Generator(device)
    generator.manual_seed(generator.seed() if seed is None else seed)
    return generator


def sample(logits: torch.Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    """Choose the next token from logits [vocab]; the generator is on the same device and is not used when greedy.

    Raises:
        FloatingPointError: the logits hold NaN, so that no choice would mean anything.
    """
    best, best_id = logits.max(dim=-1)
    if best.isnan():
        raise FloatingPointError("the model's logits hold NaN: check the weights and the dtype")
    if params.temperature == 0:
        return int(best_id)
    return int(torch.multinomial(sampling_probs(logits, params), 1, generator=generator))
