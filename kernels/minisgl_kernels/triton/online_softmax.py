"""What every attention kernel does with a tile of scores, and where the tile's keys lie."""

import triton
import triton.language as tl


@triton.jit
def softmax_step(scores, scale, largest, total, acc):
    """Take in a tile of scores q·k [M, N], which are -inf where nothing may be seen.

    Carried along each row: the largest score so far [M], times scale, which makes it a power of two; the sum of the
    weights [M] and the weighted sum of values acc [M, D], both relative to it (online softmax, Milakov & Gimelshein,
    2018). Returns the tile's weights [M, N] and the three; the tile's values are yet to be added to acc.
    """
    new_largest = tl.maximum(largest, tl.max(scores, axis=1) * scale)
    relative_to = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # nothing seen yet: -inf - -inf is NaN
    weights = tl.exp2(scores * scale - relative_to[:, None])
    rescale = tl.exp2(largest - relative_to)
    return weights, new_largest, total * rescale + tl.sum(weights, axis=1), acc * rescale[:, None]


@triton.jit
def slots_at(table, positions, end, PAGE_SIZE: tl.constexpr):
    """Slots [N] int64 of the tokens at these positions [N] of the sequence with this page table; 0 or more anywhere."""
    pages = tl.load(table + positions // PAGE_SIZE, mask=positions < end, other=0)
    return pages.to(tl.int64) * PAGE_SIZE + positions % PAGE_SIZE
