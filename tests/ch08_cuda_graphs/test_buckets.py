"""Task 08.1: the sizes to which steps are padded."""

from __future__ import annotations

import pytest

from minisgl.engine.graph import bucket_for, buckets

MOST = [1, 2, 3, 4, 5, 7, 8, 9, 16, 20, 100, 248, 255, 256, 257, 288, 300, 512, 1000]


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (4, [1, 2, 4]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (32, [1, 2, 4, 8, 16, 24, 32]),
    ],
)
def test_small_engines_have_these_sizes(most, expected):
    assert buckets(most) == expected


def test_beyond_256_sizes_are_32_apart():
    assert buckets(256)[-3:] == [240, 248, 256]
    assert buckets(300)[-4:] == [248, 256, 288, 300]


@pytest.mark.parametrize("most", MOST)
def test_the_largest_size_is_the_largest_batch(most):
    assert buckets(most)[-1] == most, f"with {most} requests side by side, no graph may be smaller or larger"


@pytest.mark.parametrize("most", MOST)
def test_sizes_rise_and_none_comes_twice(most):
    sizes = buckets(most)
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("most", MOST)
def test_every_batch_has_a_size_and_few_places_are_padding(most):
    sizes = buckets(most)
    for n in range(1, most + 1):
        padding = bucket_for(n, sizes) - n
        assert 0 <= padding <= (1 if n <= 4 else 7 if n <= 256 else 31), f"a batch of {n} is padded by {padding}"


def test_there_are_few_sizes():
    assert len(buckets(256)) == 35
    assert len(buckets(1024)) == 59
