"""Which part of each weight a rank holds. With one rank that is all of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from minisgl.distributed.comm import Comm


@dataclass(frozen=True)
class Shard:
    """Ranges of one dimension of a checkpoint's tensor, held behind one another.

    Args:
        whole: length of the dimension in the checkpoint.
        ranges: first and end of each; neighbours are better one range, since each is a copy.
        dim: 0 are rows, which are output features, and 1 columns, which are input features.
    """

    whole: int
    ranges: tuple[tuple[int, int], ...]
    dim: int = 0

    @property
    def size(self) -> int:
        return sum(end - first for first, end in self.ranges)

    def fill(self, held: torch.Tensor, full: torch.Tensor) -> None:
        """Copy this shard of the checkpoint's tensor to where it is held, and zeros to what is left there.

        Reads nothing else of `full`, whose other parts may then stay on disk.
        """
        at = 0
        for first, end in self.ranges:
            held.narrow(self.dim, at, end - first).copy_(full.narrow(self.dim, first, end - first))
            at += end - first
        held.narrow(self.dim, at, held.shape[self.dim] - at).zero_()


def even_shard(whole: int, comm: Comm, dim: int = 0) -> Shard:
    """The rank's one of equally long ranges; where that does not come out even, the last ones end early."""
    longest = -(-whole // comm.size)
    first = min(comm.rank * longest, whole)
    return Shard(whole, ((first, min(first + longest, whole)),), dim)


def head_shard(heads: Iterable[int], head_dim: int, whole: int) -> Shard:
    """The rows of these heads, in this order."""
    ranges: list[tuple[int, int]] = []
    for first in (head * head_dim for head in heads):
        joined = ranges.pop()[0] if ranges and ranges[-1][1] == first else first
        ranges.append((joined, first + head_dim))
    return Shard(whole, tuple(ranges))


def kv_heads_of(num_heads: int, num_kv_heads: int, comm: Comm) -> list[int]:
    """The KV heads that a rank holds, one for each of the equally large groups that its query heads fall into.

    A KV head stands on several ranks where they share its query heads, and twice on one where that makes the groups
    equal: 12 query heads over 3 KV heads are, for two ranks of 6 query heads, KV heads 0, 0, 1 and 1, 2, 2.
    """
    group, local = num_heads // num_kv_heads, num_heads // comm.size
    first = comm.rank * local
    return [head // group for head in range(first, first + local, math.gcd(group, local))]


def divided(number: int, what: str, size: int) -> int:
    """A rank's part of what has to be divided evenly.

    Raises:
        ValueError: it does not divide.
    """
    if number % size:
        raise ValueError(f"{number} {what} do not divide by tp {size}: choose a divisor of {number}")
    return number // size
