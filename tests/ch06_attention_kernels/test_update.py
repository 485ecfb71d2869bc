"""Task 06.1: `online_softmax.update` carries three numbers along a row, tile by tile."""

from __future__ import annotations

import math
import random

import pytest
from minisgl_kernels.online_softmax import State, begin, finish, update

INF = math.inf


def weighted_mean(scores, values):
    """In two passes, as the definition has it."""
    largest = max(scores)
    weights = [math.exp(s - largest) for s in scores]
    return [
        sum(w * row[d] for w, row in zip(weights, values, strict=True)) / sum(weights) for d in range(len(values[0]))
    ]


def run(scores, values, tile):
    state = begin(len(values[0]))
    for i in range(0, len(scores), tile):
        state = update(state, scores[i : i + tile], values[i : i + tile])
    return state


def test_the_first_tile_by_hand():
    state = update(begin(1), [0.0, math.log(3)], [[8.0], [4.0]])

    assert state.largest == pytest.approx(math.log(3)), "the largest score is the larger of this tile's two"
    assert state.total == pytest.approx(1 + 1 / 3), "weights are exp(score - largest): the largest score weighs 1"
    assert state.acc == pytest.approx([4 + 8 / 3]), "the sum of weight · value, not yet divided by the total"


def test_a_larger_score_later_makes_what_was_summed_before_smaller():
    before = State(largest=1.0, total=2.0, acc=[6.0, -2.0])

    state = update(before, [1.0 + math.log(4)], [[10.0, 0.0]])

    assert state.largest == pytest.approx(1.0 + math.log(4))
    assert state.total == pytest.approx(2 / 4 + 1), "the sum of weights still refers to the old largest score"
    assert state.acc == pytest.approx([6 / 4 + 10, -2 / 4]), "the weighted sum still refers to the old largest score"


def test_a_tile_of_small_scores_leaves_the_largest_as_it_was():
    before = State(largest=2.0, total=1.0, acc=[5.0])

    state = update(before, [2.0 - math.log(2)], [[3.0]])

    assert state.largest == 2.0, "the largest score of the row so far, not that of the last tile"
    assert state.total == pytest.approx(1.5)
    assert state.acc == pytest.approx([6.5]), "5 as it was, and half of 3: a score that is log 2 smaller weighs 1/2"


@pytest.mark.parametrize("tile", [1, 2, 3, 7, 20])
def test_tiles_of_any_size_give_the_weighted_mean(tile):
    rng = random.Random(tile)
    scores = [rng.uniform(-5, 5) for _ in range(20)]
    values = [[rng.gauss(0, 1) for _ in range(3)] for _ in scores]

    result, log_sum = finish(run(scores, values, tile))

    assert result == pytest.approx(weighted_mean(scores, values))
    assert log_sum == pytest.approx(math.log(sum(math.exp(s) for s in scores)))


def test_scores_whose_exponentials_no_number_can_hold():
    result, log_sum = finish(run([900.0, 1000.0, 1000.0, -900.0], [[1.0], [2.0], [4.0], [8.0]], tile=2))

    assert result == pytest.approx([3.0])
    assert log_sum == pytest.approx(1000 + math.log(2))


def test_masked_scores_weigh_nothing():
    result, _ = finish(run([-INF, 1.0, 1.0, -INF], [[100.0], [2.0], [4.0], [100.0]], tile=2))

    assert result == pytest.approx([3.0]), "a score of -inf was taken for a weight, or its value counted"


def test_tiles_that_are_masked_altogether_change_nothing():
    state = run([-INF] * 4 + [1.0, 1.0] + [-INF] * 4, [[9.0]] * 4 + [[2.0], [4.0]] + [[9.0]] * 4, tile=2)

    assert not math.isnan(state.total), "-inf - -inf is NaN: what is the largest score while nothing was seen?"
    assert finish(state)[0] == pytest.approx([3.0])


def test_nothing_seen_is_nothing_summed():
    state = update(begin(2), [-INF, -INF], [[1.0, 1.0], [1.0, 1.0]])

    assert state == begin(2), "while every score is -inf, the state stays as it is"


def test_the_state_before_is_not_changed():
    before = State(0.0, 1.0, [1.0, 2.0])

    update(before, [3.0], [[4.0, 5.0]])

    assert before == State(0.0, 1.0, [1.0, 2.0]), "the old State's list was changed"
