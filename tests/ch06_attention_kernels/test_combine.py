"""Task 06.2: `online_softmax.combine` makes one result of several, each weighed by its share of the sum of weights."""

from __future__ import annotations

import itertools
import math

import pytest
from minisgl_kernels.online_softmax import combine

INF = math.inf


def part(scores, values):
    """What a split leaves of its scores and values of one number: the mean, and the logarithm of the sum."""
    if not scores:
        return [math.nan], -INF
    total = sum(math.exp(s) for s in scores)
    return [sum(math.exp(s) * v for s, v in zip(scores, values, strict=True)) / total], math.log(total)


def combined(*parts):
    results, log_sums = zip(*parts, strict=True)
    return combine(results, log_sums)


def test_two_parts_by_hand():
    """Sums of weights 3 and 1: three quarters of the one, a quarter of the other."""
    result, log_sum = combine([[8.0, 0.0], [0.0, 4.0]], [math.log(3), 0.0])

    assert result == pytest.approx([6.0, 1.0]), "weigh each part by exp(log sum), and divide by the sum of these"
    assert log_sum == pytest.approx(math.log(4)), "sums of weights add up; add the largest again"


def test_one_part_is_the_result():
    result, log_sum = combine([[1.5, -2.0]], [-7.0])

    assert result == pytest.approx([1.5, -2.0])
    assert log_sum == pytest.approx(-7.0)


SCORES, VALUES = [2.0, -1.0, 0.5, 3.0, -2.5, 0.0, 1.0], [1.0, 5.0, -3.0, 2.0, 8.0, -1.0, 4.0]


@pytest.mark.parametrize("cuts", [[3], [1, 2], [2, 3, 6], [1, 2, 3, 4, 5, 6]])
def test_wherever_a_row_is_cut_the_whole_comes_out(cuts):
    edges = [0, *cuts, len(SCORES)]
    parts = [part(SCORES[a:b], VALUES[a:b]) for a, b in itertools.pairwise(edges)]
    expected, expected_log_sum = part(SCORES, VALUES)

    result, log_sum = combined(*parts)

    assert result == pytest.approx(expected)
    assert log_sum == pytest.approx(expected_log_sum), "the log sum of the whole, not its largest part's"
    assert combined(*parts[::-1])[0] == pytest.approx(expected), "the order of the parts must not matter"


def test_what_comes_out_can_be_combined_again():
    left, middle, right = (part(SCORES[a:b], VALUES[a:b]) for a, b in [(0, 2), (2, 5), (5, 7)])

    result, log_sum = combined(combined(left, middle), right)

    expected, expected_log_sum = part(SCORES, VALUES)
    assert result == pytest.approx(expected)
    assert log_sum == pytest.approx(expected_log_sum)


def test_a_part_that_saw_nothing_is_not_looked_at():
    result, log_sum = combined(part([], []), part([1.0], [5.0]), part([], []))

    assert result == pytest.approx([5.0]), "its result may be NaN, and 0 · NaN is NaN"
    assert log_sum == pytest.approx(1.0)


def test_parts_that_all_saw_nothing_give_zeros():
    result, log_sum = combined(part([], []), part([], []))

    assert result == [0.0], "as many zeros as a result has numbers"
    assert log_sum == -INF


@pytest.mark.parametrize("level", [-2000.0, 2000.0])
def test_log_sums_whose_exponentials_no_number_can_hold(level):
    result, log_sum = combine([[8.0], [0.0]], [level + math.log(3), level])

    assert result == pytest.approx([6.0]), "subtract the largest log sum before exp"
    assert log_sum == pytest.approx(level + math.log(4)), "add the largest log sum again"
