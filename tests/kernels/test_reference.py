"""Reference ops against formulas in float64. Those that are tasks of a chapter are tested in its folder."""

from __future__ import annotations

import math

import pytest
import torch
from minisgl_kernels import silu_and_mul
from minisgl_kernels.reference import SAMPLE_BLOCK, gumbel_noise, sample


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_silu_and_mul_gates_with_the_first_half_and_multiplies_the_second(dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(5, 2 * 13, generator=generator).to(dtype)
    gate, up = gate_up.double()[:, :13], gate_up.double()[:, 13:]

    out = silu_and_mul(gate_up)

    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), gate / (1 + (-gate).exp()) * up, atol=tolerance, rtol=tolerance)


# Sampling. tests/engine/test_sampler.py compares with the one-row definition of chapter 1.

DRAWS = 20_000


def draw(logits, temperature=1.0, seeds=0, positions=0, **filters):
    """Ids for rows of logits [B, vocab], each parameter one number for all rows or one each."""
    rows = len(logits)
    temperature, seeds, positions = (
        torch.as_tensor(value, dtype=dtype).expand(rows).contiguous()
        for value, dtype in ((temperature, torch.float32), (seeds, torch.int64), (positions, torch.int64))
    )
    return sample(logits, temperature, seeds, positions, **filters)


def deviation(ids, probs):
    """How many standard deviations the chi-square statistic of drawn ids is above its mean."""
    due = probs.double() * len(ids)
    assert due.min() >= 5, "too few draws for these probabilities"
    statistic = ((ids.bincount(minlength=len(due)) - due) ** 2 / due).sum().item()
    return (statistic - (len(due) - 1)) / math.sqrt(2 * (len(due) - 1))


@pytest.mark.parametrize("along", ["seeds", "positions"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_along_seeds_and_along_positions_follow_the_softmax(along, temperature):
    logits = torch.linspace(-1, 1, 29)
    ids = draw(logits.expand(DRAWS, -1), temperature, **{along: torch.arange(DRAWS)})

    assert deviation(ids, (logits / temperature).softmax(0)) < 5


def test_draws_from_several_blocks_follow_the_softmax():
    places = torch.tensor([0, 1, SAMPLE_BLOCK - 1, SAMPLE_BLOCK, 2 * SAMPLE_BLOCK - 1, 2 * SAMPLE_BLOCK, 5000])
    logits = torch.full((5001,), -torch.inf)
    logits[places] = torch.tensor([0.0, 1.0, -0.5, 0.3, 2.0, -0.2, 1.2])
    ids = torch.cat(
        [draw(logits.expand(500, -1), seeds=9, positions=torch.arange(i, i + 500)) for i in range(0, 5000, 500)]
    )

    assert deviation(torch.searchsorted(places, ids), logits[places].softmax(0)) < 5
    assert set(ids.tolist()) <= set(places.tolist())


def test_draws_at_neighbouring_positions_are_independent():
    ids = draw(torch.zeros(DRAWS, 4), seeds=3, positions=torch.arange(DRAWS))
    pairs = ids[:-1:2] * 4 + ids[1::2]

    assert deviation(pairs, torch.full((16,), 1 / 16)) < 5


def test_the_noise_of_tokens_and_blocks_has_the_gumbel_distribution():
    counters = torch.arange(-DRAWS, DRAWS).unsqueeze(0)
    [noise] = gumbel_noise(torch.tensor([2**63 - 1]), torch.tensor([10**6]), counters) * math.log(2)
    uniform = torch.exp(-torch.exp(-(noise.double() - math.log(math.log(2)))))  # undoes the constant left out

    assert noise.isfinite().all()
    assert deviation((uniform * 20).long(), torch.full((20,), 1 / 20)) < 5
    assert abs(torch.corrcoef(torch.stack([uniform[:-1], uniform[1:]]))[0, 1]) < 0.02  # four deviations


@pytest.mark.parametrize("other", [{"seeds": 6}, {"positions": 4}, {"counters": 1}])
def test_noise_is_another_for_another_seed_position_or_counter(other):
    at = {"seeds": 5, "positions": 3, "counters": 0}
    numbers = [
        gumbel_noise(torch.tensor([w["seeds"]]), torch.tensor([w["positions"]]), torch.tensor([[w["counters"]]])).item()
        for w in (at, at, at | other)
    ]
    assert numbers[0] == numbers[1] != numbers[2]


def test_a_rows_draw_is_the_same_alone_and_in_any_company():
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(0)) * 3
    temperature, seeds = torch.tensor([1.0, 0.0, 0.5, 1.0, 2.0, 1.0]), torch.arange(6) * 11
    filters = {
        "top_k": torch.tensor([0, 0, 5, 0, 0, 0]),
        "top_p": torch.tensor([1.0, 1.0, 1.0, 0.5, 1.0, 1.0]),
        "min_p": torch.tensor([0.0, 0.0, 0.0, 0.0, 0.3, 0.0]),
    }
    ids = draw(logits, temperature, seeds, **filters)

    for i in range(6):
        own = {name: value[i : i + 1] for name, value in filters.items()}
        assert draw(logits[i : i + 1], temperature[i], seeds[i], **own) == ids[i]
    for i in (0, 1, 5):  # that filter nothing
        assert draw(logits[i : i + 1], temperature[i], seeds[i]) == ids[i]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_with_nan_or_inf_gives_no_id_and_its_neighbours_theirs(temperature, bad):
    logits = torch.randn(3, 3000, generator=torch.Generator().manual_seed(0))
    clean = draw(logits, temperature)
    logits[1, 2500] = bad

    assert draw(logits, temperature).tolist() == [clean[0], -1, clean[2]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_minus_inf_gives_no_id(temperature):
    assert draw(torch.full((1, 50), -torch.inf), temperature).tolist() == [-1]


@pytest.mark.parametrize("temperature", [1e-40, 1e-6])
def test_a_tiny_temperature_takes_the_largest_logit(temperature):
    logits = torch.randn(20, 5000, generator=torch.Generator().manual_seed(0)) + 20

    assert draw(logits, temperature, torch.arange(20)).tolist() == logits.argmax(dim=-1).tolist()


def test_a_huge_temperature_draws_all_tokens_alike():
    ids = draw(torch.linspace(-20, 20, 40).expand(DRAWS, -1), 1e6, positions=torch.arange(DRAWS))

    assert deviation(ids, torch.full((40,), 1 / 40)) < 5


def test_greedy_ties_go_to_the_smaller_id():
    assert draw(torch.zeros(2, 5000), torch.tensor([0.0, 1.0]))[0] == 0
