"""The online softmax in plain Python: a weighted mean of values, in one pass over the scores, tile by tile.

The kernels do the same on tiles of numbers at once, with powers of two. Knows nothing of where scores come from.
Idea: Milakov & Gimelshein, 2018; for attention: Rabe & Staats, 2021, and FlashAttention (Dao et al., 2022).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class State(NamedTuple):
    """What is carried along a row of scores."""

    largest: float  # score so far; -inf before the first
    total: float  # the sum of exp(score - largest)
    acc: list[float]  # the sum of exp(score - largest) · value


def begin(width: int) -> State:
    """The state before the first score, for values of `width` numbers."""
    return State(-math.inf, 0.0, [0.0] * width)


def update(state: State, scores: Sequence[float], values: Sequence[Sequence[float]]) -> State:
    """The state after a tile more: its scores, and as many values. A score of -inf is masked, and weighs nothing."""
    largest = max(state.largest, *scores)
    if largest == -math.inf:
        return state  # nothing was seen yet, and -inf - -inf is NaN
    rescale = math.exp(state.largest - largest)
    weights = [math.exp(score - largest) for score in scores]
    acc = [
        a * rescale + sum(w * row[d] for w, row in zip(weights, values, strict=True)) for d, a in enumerate(state.acc)
    ]
    return State(largest, state.total * rescale + sum(weights), acc)


def finish(state: State) -> tuple[list[float], float]:
    """The weighted mean of the values, and the logarithm of the sum of exp(score). Without a score zeros, and -inf."""
    if state.total == 0:
        return state.acc, -math.inf
    return [a / state.total for a in state.acc], state.largest + math.log(state.total)


def combine(results: Sequence[Sequence[float]], log_sums: Sequence[float]) -> tuple[list[float], float]:
    """One result and log sum from those that `finish` gave over parts of a row.

    A part with a log sum of -inf has seen nothing: its result may hold anything, and is not looked at.
    """
    largest = max(log_sums)
    if largest == -math.inf:
        return [0.0] * len(results[0]), largest
    acc, total = [0.0] * len(results[0]), 0.0
    for result, log_sum in zip(results, log_sums, strict=True):
        if log_sum > -math.inf:
            weight = math.exp(log_sum - largest)
            acc, total = [a + weight * r for a, r in zip(acc, result, strict=True)], total + weight
    return [a / total for a in acc], largest + math.log(total)
