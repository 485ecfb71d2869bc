"""Attention over pages in plain torch, for sequences of any lengths in one step.

Sequences that compute one token are gathered together with others of similar length; a chunk is a group of its own.
So nobody is padded to more than twice its length, and the number of groups stays small.
"""

from collections import defaultdict
from dataclasses import dataclass

import torch
from minisgl_kernels import attend

from minisgl.core import ForwardBatch, PagedRows, WorkCounts
from minisgl.kvcache.mha_pool import MHAPool, slots_of


@dataclass
class Group:
    """G sequences that compute n tokens each, over S slots each: the longest has S tokens, the others are padded."""

    queries: torch.Tensor  # [G · n] rows of q
    slots: torch.Tensor  # [G, S]; padding repeats the sequence's last slot
    mask: torch.Tensor | None  # [G, 1, n, S], True where a query may look; None if everywhere


class TorchAttention:
    """One step's attention. The grouping is made once and serves every layer.

    Args:
        pool: where K and V are.
        rows: where this step's sequences lie in it.
        work: where the bytes moved are counted.
    """

    def __init__(self, pool: MHAPool, rows: PagedRows, work: WorkCounts | None = None) -> None:
        self.pool, self.rows, self.work = pool, rows, work or WorkCounts()
        self.groups = make_groups(rows, pool.page_size)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, batch: ForwardBatch
    ) -> torch.Tensor:
        """Store, then attend over the pages. See core.AttentionBackend."""
        self.pool.store(layer, k, v, self.rows.slots)
        self.work.kv_bytes_written += k.nbytes + v.nbytes
        keys, values = self.pool.layer(layer)
        out = torch.empty_like(q)
        for group in self.groups:
            group_k, group_v = keys[group.slots], values[group.slots]  # [G, S, kv_heads, head_dim]
            self.work.kv_bytes_read += group_k.nbytes + group_v.nbytes
            grouped_q = q[group.queries].view(len(group.slots), -1, *q.shape[1:])  # [G, n, heads, head_dim]
            out[group.queries] = attend(grouped_q, group_k, group_v, group.mask).flatten(0, 1)
        return out


def make_groups(rows: PagedRows, page_size: int) -> list[Group]:
    """Sequences with one new token go together if their lengths have the same number of bits; others go alone."""
    device = rows.slots.device
    members: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, (new, total) in enumerate(zip(rows.query_lens, rows.kv_lens, strict=True)):
        members[(0, total.bit_length()) if new == 1 else (1, i)].append(i)
    starts = torch.tensor([0, *rows.query_lens]).cumsum(0)  # of each sequence in the step's T tokens
    groups = []
    for indices in members.values():
        new, longest = rows.query_lens[indices[0]], max(rows.kv_lens[i] for i in indices)
        totals = torch.tensor([rows.kv_lens[i] for i in indices], device=device).unsqueeze(1)  # [G, 1]
        places = torch.arange(longest, device=device).expand(len(indices), -1)  # [G, S]
        last_seen = totals - new + torch.arange(new, device=device)  # [G, n]: a query sees itself and what precedes it
        mask = (places.unsqueeze(1) <= last_seen.unsqueeze(2)).unsqueeze(1)  # [G, 1, n, S]
        queries = (starts[indices].unsqueeze(1) + torch.arange(new)).flatten().to(device)
        slots = slots_of(rows.page_table[indices], places.minimum(totals - 1), page_size)
        equal = new == 1 and all(rows.kv_lens[i] == longest for i in indices)
        groups.append(Group(queries, slots, None if equal else mask))
    return groups


class PaddedAttention:
    """Attention of one query a sequence in a step of fixed shapes: everybody is as long as the page table is wide.

    For graphs of torch's ops, at their price: what lies behind a sequence's end is read too.
    """

    takes_chunks = False

    def __init__(self, pool: MHAPool, rows: PagedRows, work: WorkCounts | None = None) -> None:
        self.pool, self.rows = pool, rows
        width, lens = rows.page_table.shape[1] * pool.page_size, rows.device_kv_lens.unsqueeze(1)
        places = torch.arange(width, device=lens.device).expand(len(lens), -1)  # [B, S]
        self.slots = slots_of(rows.page_table, places.minimum(lens - 1), pool.page_size)
        self.mask = (places < lens)[:, None, None, :]  # [B, 1, 1, S]

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, batch: ForwardBatch
    ) -> torch.Tensor:
        """See TorchAttention.forward."""
        self.pool.store(layer, k, v, self.rows.slots)
        keys, values = self.pool.layer(layer)
        return attend(q.unsqueeze(1), keys[self.slots], values[self.slots], self.mask).squeeze(1)
