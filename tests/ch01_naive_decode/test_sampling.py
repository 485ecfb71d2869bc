"""01.4 sampling_probs."""

from __future__ import annotations

import math

import pytest
import torch

import minisgl.engine.sample as sampling
from minisgl.core import SamplingParams


def by_hand(logits: list[float], params: SamplingParams) -> list[float]:
    """The filters one after another on Python floats: temperature, top-k, top-p, min-p."""
    largest = max(logits)
    weights = {i: math.exp((x - largest) / params.temperature) for i, x in enumerate(logits)}
    kept = normalised(weights, sorted(weights, key=lambda i: (-weights[i], i))[: params.top_k or None])
    if params.top_p < 1:
        mass, ids = 0.0, list[int]()
        for i, p in kept.items():
            if mass >= params.top_p:
                break
            ids.append(i)
            mass += p
        kept = normalised(kept, ids)
    kept = normalised(kept, [i for i, p in kept.items() if p >= params.min_p * max(kept.values())])
    return [kept.get(i, 0.0) for i in range(len(logits))]


def normalised(weights: dict[int, float], ids: list[int]) -> dict[int, float]:
    total = sum(weights[i] for i in ids)
    return {i: weights[i] / total for i in ids}


def probs_of(probabilities: list[float], **params: float) -> list[float]:
    """sampling_probs of logits that a softmax turns into these probabilities."""
    logits = torch.tensor(probabilities).log()
    return sampling.sampling_probs(logits, SamplingParams(**{"temperature": 1.0} | params)).tolist()  # type: ignore[arg-type]


SOME_PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=2.5),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=0.7, top_p=0.8),
    SamplingParams(temperature=1.5, min_p=0.2),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.6),
    SamplingParams(temperature=1.8, top_k=30, top_p=0.9, min_p=0.15),
]


@pytest.mark.parametrize("params", SOME_PARAMS, ids=lambda p: f"T{p.temperature}-k{p.top_k}-p{p.top_p}-min{p.min_p}")
def test_temperature_then_top_k_then_top_p_then_min_p(params: SamplingParams):
    for seed in range(5):
        torch.manual_seed(seed)
        logits = torch.randn(101) * 2

        probs = sampling.sampling_probs(logits, params)

        expected = torch.tensor(by_hand(logits.tolist(), params))
        kept, should = int((probs > 0).sum()), int((expected > 0).sum())
        torch.testing.assert_close(
            probs,
            expected,
            rtol=1e-4,
            atol=1e-6,
            msg=lambda m, k=kept, s=should: f"{k} tokens have a probability above 0, should be {s}; by token id:\n{m}",
        )


def test_the_worked_example_of_the_page():
    probs = probs_of([0.05, 0.4, 0.1, 0.3, 0.15], top_k=3, top_p=0.8)

    expected = pytest.approx([0, 4 / 7, 0, 3 / 7, 0], abs=1e-6)
    assert probs == expected, f"in the order of the ids it is (0, 4/7, 0, 3/7, 0): got {probs}"


def test_without_filters_it_is_the_softmax_of_logits_over_temperature():
    torch.manual_seed(0)
    logits = torch.randn(33)

    probs = sampling.sampling_probs(logits, SamplingParams(temperature=0.5))

    torch.testing.assert_close(
        probs, (logits / 0.5).softmax(dim=-1), msg=lambda m: f"not softmax(logits / temperature), by token id\n{m}"
    )


def test_temperature_changes_which_tokens_top_p_keeps():
    cold = probs_of([0.4, 0.3, 0.2, 0.1], temperature=0.25, top_p=0.7)
    hot = probs_of([0.4, 0.3, 0.2, 0.1], temperature=4.0, top_p=0.7)

    assert sum(p > 0 for p in cold) == 1, "a cold distribution has 0.72 on its first token: it alone reaches top_p"
    assert sum(p > 0 for p in hot) == 3, "a hot distribution is flat: three tokens are needed to reach top_p"


def test_the_token_that_crosses_top_p_is_kept():
    probs = probs_of([0.5, 0.3, 0.2], top_p=0.6)

    assert probs == pytest.approx([0.625, 0.375, 0], abs=1e-6), (
        "the second token takes the mass from 0.5 to 0.8: it crosses 0.6, so it is the last that is kept"
    )


def test_mass_of_exactly_top_p_is_enough():
    probs = probs_of([0.25, 0.25, 0.25, 0.25], top_p=0.5)

    assert probs == [0.5, 0.5, 0, 0], (
        "the first two tokens have 0.5 together and reach top_p 0.5: the third is too many"
    )


def test_a_tiny_top_p_still_keeps_the_best_token():
    assert probs_of([0.2, 0.5, 0.3], top_p=1e-9) == pytest.approx([0, 1, 0]), "the best token crosses any top_p"


def test_top_p_counts_the_mass_that_is_left_after_top_k():
    probs = probs_of([0.4, 0.3, 0.2, 0.1], top_k=2, top_p=0.5)

    assert probs == pytest.approx([1, 0, 0, 0]), "of the two tokens top-k left, the first has 4/7 of the mass: enough"


def test_min_p_is_a_fraction_of_the_best_tokens_probability():
    probs = probs_of([0.4, 0.3, 0.2, 0.1], min_p=0.6)

    assert probs == pytest.approx([4 / 7, 3 / 7, 0, 0], abs=1e-6), "min_p 0.6 drops what is below 0.6 · 0.4 = 0.24"


def test_a_top_p_of_1_drops_no_token():
    torch.manual_seed(0)
    logits = torch.randn(49152) * 4  # the sum of the sorted probabilities rounds to 1 long before the last token

    probs = sampling.sampling_probs(logits, SamplingParams(temperature=1.0, top_p=1.0))

    dropped = int((probs == 0).sum())
    assert not dropped, f"{dropped} tokens were dropped: at top_p 1 skip the filter, since rounded sums reach 1 early"


@pytest.mark.parametrize("top_k", [1, 3, 20, 1000])
@pytest.mark.parametrize("best", [range(50), range(49152), range(1, 49152, 2)], ids=str)
def test_top_k_keeps_the_smaller_ids_among_equals(best: range, top_k: int):
    logits = torch.full([best.stop], -1.0)
    logits[best] = 0.0

    probs = sampling.sampling_probs(logits, SamplingParams(temperature=1.0, top_k=top_k))

    kept = probs.nonzero().flatten().tolist()
    assert kept == list(best[:top_k]), f"kept {kept[:5]} …, not the smallest ids among equals: is the sort stable?"


def test_top_k_beyond_the_vocabulary_keeps_all():
    assert probs_of([0.5, 0.3, 0.2], top_k=1000) == pytest.approx([0.5, 0.3, 0.2]), "there are only 3 tokens to keep"


@pytest.mark.parametrize("temperature", [1e-36, 1e-6, 1e4])
def test_extreme_logits_and_temperatures_stay_finite(temperature: float):
    logits = torch.tensor([-3e4, 5e4, 3e4, float("-inf")])

    probs = sampling.sampling_probs(logits, SamplingParams(temperature=temperature, top_p=0.999))

    assert probs.isfinite().all(), f"got {probs.tolist()}: subtract the largest logit before dividing"
    assert probs[3] == 0, "a logit of -inf forbids its token"


@pytest.mark.parametrize("params", SOME_PARAMS, ids=lambda p: f"T{p.temperature}-k{p.top_k}-p{p.top_p}-min{p.min_p}")
def test_16_bit_logits_give_fp32_probabilities_that_sum_to_1(params: SamplingParams):
    torch.manual_seed(0)
    logits = torch.randn(4097).to(torch.bfloat16)

    probs = sampling.sampling_probs(logits, params)

    total = probs.sum().item()
    assert probs.dtype == torch.float32, f"the logits are bfloat16, the result {probs.dtype}: compute in fp32"
    assert total == pytest.approx(1, abs=1e-5), f"the probabilities sum to {total}: normalise after the last filter"


def test_the_logits_are_left_alone():
    logits = torch.randn(17)
    before = logits.clone()

    sampling.sampling_probs(logits, SamplingParams(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1))

    torch.testing.assert_close(logits, before, msg="the caller's logits were overwritten")
