"""Sampling of many rows at once, against the one-row oracle, transformers' processors and plain arithmetic."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from minisgl.core import Batch, Request, SamplingParams
from minisgl.engine.sample import sampling_probs
from minisgl.engine.sampler import adjust, append_logprobs
from tests.helpers import request, sample_rows

VOCAB = 37
FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 1000},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 0.3},
    {"temperature": 1e-4},
    {"temperature": 3.0, "top_k": 20, "top_p": 0.7, "min_p": 0.05},
    {"temperature": 1.5, "top_k": 6, "top_p": 0.6},  # renormalised after top-k, or fewer tokens would stay
]


def logits_of(rows, seed=0, vocab=VOCAB):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def sampled(id=0, tokens=(1, 2, 3), seed=0, **params):
    r = request(id, tokens, **({"temperature": 1.0} | params))
    r.seed = seed
    return r


# The distribution


def test_rows_of_different_filters_follow_the_one_row_distributions():
    draws, logits = 4000, logits_of(len(FILTERS))
    each = [SamplingParams(**({"temperature": 1.0} | filters)) for filters in FILTERS]
    tokens = torch.tensor(sample_many(logits, each, draws))

    for row, params, drawn in zip(logits, each, tokens.unbind(1), strict=True):
        probs, counter = sampling_probs(row, params), Counter(drawn.tolist())
        assert set(counter) <= set(probs.nonzero().flatten().tolist()), params
        chi_square, degrees = chi_square_of(counter, probs, draws)
        assert chi_square < degrees + 5 * math.sqrt(2 * degrees) + 5, params  # five deviations, for fixed seeds


def sample_many(logits, each, draws):
    """[draws][rows] tokens: all rows of different params in one call, under seeds 0, 1, 2 …"""
    rows = [Request(0, [1], params, seed=draw * 1000 + i) for draw in range(draws) for i, params in enumerate(each)]
    tokens = sample_rows(logits.repeat(draws, 1), rows)
    return [tokens[i : i + len(each)] for i in range(0, len(tokens), len(each))]


def chi_square_of(counter, probs, draws):
    """The statistic and its degrees of freedom; tokens expected fewer than five times are taken together."""
    common = [(counter[i], p * draws) for i, p in enumerate(probs.tolist()) if p * draws >= 5]
    rest = (draws - sum(seen for seen, _ in common), draws - sum(due for _, due in common))
    cells = [*common, rest] if rest[1] > 5 else common
    return sum((seen - due) ** 2 / due for seen, due in cells), len(cells) - 1


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_every_token_that_the_filters_leave_can_be_drawn_and_no_other(filters):
    logits, params = logits_of(1, seed=3, vocab=11), SamplingParams(**({"temperature": 1.0} | filters))
    probs = sampling_probs(logits[0], params)
    drawn = {token for [token] in sample_many(logits, [params], 3000)}

    assert drawn <= set(probs.nonzero().flatten().tolist())
    assert drawn >= set((probs > 0.005).nonzero().flatten().tolist())


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_k": 1}, {"temperature": 1e-6}, {"top_p": 1e-6}])
def test_what_leaves_one_token_is_greedy(params):
    logits = logits_of(6)
    rows = [sampled(i, seed=i, **params) for i in range(6)]

    assert sample_rows(logits, rows) == logits.argmax(dim=-1).tolist()


def test_greedy_and_sampled_rows_do_not_disturb_each_other():
    logits = logits_of(4)
    rows = [sampled(i, seed=i, temperature=float(i % 2)) for i in range(4)]

    assert sample_rows(logits, rows) == [sample_rows(logits[i : i + 1], [rows[i]])[0] for i in range(4)]


def test_ties_go_to_the_smaller_id():
    assert sample_rows(torch.zeros(2, VOCAB), [sampled(temperature=0.0), sampled(top_k=1)]) == [0, 0]


# Seeds


def test_a_rows_choice_depends_on_neither_its_place_nor_its_neighbours():
    logits = logits_of(8)
    rows = [sampled(i, seed=10 * i, **FILTERS[i]) for i in range(8)]
    forward = sample_rows(logits, rows)

    assert sample_rows(logits.flip(0), rows[::-1]) == forward[::-1]
    assert [sample_rows(logits[i : i + 1], [rows[i]])[0] for i in range(8)] == forward


def test_a_request_that_was_preempted_goes_on_with_the_same_choices():
    logits = logits_of(1)
    before = sampled(tokens=[1, 2], seed=9)
    before.tokens += [3, 4]
    resumed = sampled(tokens=[1, 2], seed=9)
    resumed.tokens += [3, 4]
    resumed.preemptions, resumed.row = 1, 5

    assert sample_rows(logits, [before]) == sample_rows(logits, [resumed])


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_every_seed_and_position_draws_anew(seed):
    rows = [sampled(tokens=[1] * n, seed=seed) for n in range(1, 65)]

    assert len(set(sample_rows(torch.zeros(64, 10_000), rows))) > 60  # two of 64 meet in one case of five


# What the op is given


class Recorder:
    """An ops module that keeps what `sample` is called with."""

    def __init__(self):
        self.calls = []

    def sample(self, logits, *parameters):
        self.calls.append((logits, *parameters))
        return torch.zeros(len(logits), dtype=torch.int64)


def test_all_rows_go_to_the_op_in_one_call_with_their_parameters():
    ops, seeds = Recorder(), [2**63 - 1, 0, 7]
    each = [{"temperature": 0.0}, {"top_k": 5, "top_p": 0.9}, {"temperature": 0.7, "min_p": 0.1}]
    rows = [sampled(i, tokens=[1] * (i + 1), seed=seeds[i], **params) for i, params in enumerate(each)]
    sample_rows(logits_of(3), rows, ops)

    [[_, temperature, seed, position, top_k, top_p, min_p]] = ops.calls
    assert (seed.tolist(), position.tolist(), top_k.tolist()) == (seeds, [1, 2, 3], [0, 5, 0])
    floats = torch.tensor([[0.0, 1.0, 0.7], [1.0, 0.9, 1.0], [0.0, 0.0, 0.1]])
    assert torch.equal(torch.stack([temperature, top_p, min_p]), floats)


def test_filters_that_no_row_asks_for_are_left_out():
    ops = Recorder()
    sample_rows(logits_of(2), [sampled(0), sampled(1, temperature=0.0)], ops)

    assert len(ops.calls[0]) == 4


def test_logits_that_no_row_adjusts_reach_the_op_as_they_are():
    ops, logits = Recorder(), logits_of(2).bfloat16()
    sample_rows(logits, [sampled(0, top_p=0.5), sampled(1, logprobs=1)], ops)

    assert ops.calls[0][0] is logits


def test_an_adjustment_of_16_bit_logits_is_in_32_bits():
    logits = torch.full((1, VOCAB), 100.0).bfloat16()
    adjusted = adjust(logits, [sampled(logit_bias={3: 0.125})])

    assert adjusted[0, 3].item() == 100.125


# Penalties and biases


@pytest.mark.parametrize("penalty", [0.7, 1.3])
def test_the_repetition_penalty_is_transformers(penalty):
    logits, r = logits_of(1), sampled(tokens=[5, 6, 6], repetition_penalty=penalty)
    r.tokens += [9, 5]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([r.tokens]), logits.clone())

    torch.testing.assert_close(adjust(logits, [r]), expected)


def test_presence_and_frequency_count_the_answer_and_not_the_prompt():
    logits, r = torch.zeros(1, VOCAB), sampled(tokens=[5, 6], presence_penalty=0.5, frequency_penalty=0.25)
    r.tokens += [9, 7, 9]
    adjusted = adjust(logits, [r])[0]

    assert adjusted[[5, 6, 7, 9]].tolist() == [0, 0, -0.75, -1.0]
    assert adjusted.count_nonzero() == 2


def test_logit_bias_is_transformers_sequence_bias():
    logits, r = logits_of(1), sampled(logit_bias={4: 5.0, 30: -100.0})
    expected = SequenceBiasLogitsProcessor([[[4], 5.0], [[30], -100.0]])(torch.tensor([r.tokens]), logits.clone())

    torch.testing.assert_close(adjust(logits, [r]), expected)


@pytest.mark.parametrize("answer", [[], [8], [8, 8], [8, 8, 8]])
def test_min_tokens_forbids_every_stop_token_as_transformers_does(answer):
    logits, r = logits_of(1), request(0, [1, 2], stop_ids=[3, 11], min_tokens=2)
    r.tokens += answer
    processor = MinNewTokensLengthLogitsProcessor(2, 2, [3, 11])
    expected = processor(torch.tensor([r.tokens]), logits.clone())

    torch.testing.assert_close(adjust(logits, [r]), expected)


def test_a_stop_token_outside_the_vocabulary_is_no_matter():
    r = request(0, [1, 2], stop_ids=[VOCAB, 10**6, -1], min_tokens=2)
    assert adjust(logits_of(1), [r]).isfinite().all()


def test_penalties_add_up_in_one_row_and_leave_the_others_alone():
    logits = logits_of(3)
    r = sampled(1, tokens=[5], repetition_penalty=2.0, presence_penalty=1.0, logit_bias={9: 3.0})
    r.tokens.append(9)
    adjusted = adjust(logits, [sampled(0), r, sampled(2)])

    assert torch.equal(adjusted[[0, 2]], logits[[0, 2]])
    value = logits[1, 9].item()
    assert adjusted[1, 9].item() == pytest.approx((value / 2 if value > 0 else value * 2) - 1 + 3)


def test_the_models_logits_are_not_changed():
    logits = logits_of(1)
    saved = logits.clone()
    sample_rows(logits, [sampled(repetition_penalty=2.0, logit_bias={1: 4.0}, top_p=0.5, logprobs=2)])

    assert torch.equal(logits, saved)


# Log-probabilities


def test_logprobs_are_the_models_own_whatever_the_parameters():
    logits = logits_of(2)
    rows = [
        sampled(0, logprobs=3, temperature=0.2, top_k=1, logit_bias={7: 50.0}),
        sampled(1, logprobs=0),
    ]
    tokens = sample_rows(logits, rows)
    expected = logits.log_softmax(dim=-1)

    assert tokens[0] == 7
    for row, r, token in zip(expected, rows, tokens, strict=True):
        [got] = r.logprobs
        assert got.token_id == token
        assert got.logprob == pytest.approx(row[token].item(), abs=1e-6)
    values, ids = expected[0].topk(3)
    assert list(rows[0].logprobs[0].top) == ids.tolist()
    assert list(rows[0].logprobs[0].top.values()) == pytest.approx(values.tolist(), abs=1e-6)
    assert rows[1].logprobs[0].top == {}


def test_each_row_gets_as_many_logprobs_as_it_asked_for():
    rows = [sampled(0, logprobs=1), sampled(1), sampled(2, logprobs=4)]
    sample_rows(logits_of(3), rows)

    assert [len(r.logprobs[0].top) if r.logprobs else None for r in rows] == [1, None, 4]


def test_more_logprobs_than_tokens_are_as_many_as_there_are():
    [r] = rows = [sampled(logprobs=20)]
    sample_rows(logits_of(1, vocab=5), rows)

    assert sorted(r.logprobs[0].top) == [0, 1, 2, 3, 4]


def test_impossible_tokens_have_no_nan_among_the_logprobs():
    logits = logits_of(1)
    logits[0, 5:] = float("-inf")
    r = sampled(logprobs=8)
    sample_rows(logits, [r])

    assert not any(math.isnan(value) for value in r.logprobs[0].top.values())
    assert r.logprobs[0].token_id < 5


def test_nan_gives_no_token_and_no_logprobs_and_does_not_touch_its_neighbours():
    logits = logits_of(3)
    logits[1, 4] = float("nan")
    rows = [sampled(i, seed=i, logprobs=1) for i in range(3)]
    alone = [sampled(i, seed=i) for i in range(3)]
    tokens = sample_rows(logits, rows)

    assert tokens[1] == -1
    assert [len(r.logprobs) for r in rows] == [1, 0, 1]
    assert [tokens[0], tokens[2]] == sample_rows(logits[[0, 2]], [alone[0], alone[2]])


def test_behind_an_unfinished_chunk_there_are_no_logprobs():
    reading, other = sampled(0, tokens=[1] * 9, logprobs=1), sampled(1, logprobs=1)
    append_logprobs(logits_of(2), Batch([reading, other], [0, 2], [4, 1]), [5, 6])

    assert (reading.logprobs, [each.token_id for each in other.logprobs]) == ([], [6])
