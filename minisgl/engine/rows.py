"""What the device keeps of each running request, so that a decode step needs nothing from the host.

Every request has a row: its page table, its next token, how many tokens came before it, and how it is sampled. The host
sends what it changes; a step reads the rows, and writes the token and the length that the next step starts from.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from minisgl_kernels import reference

from minisgl.core import Batch, Request

_FIELDS = ("order", "tokens", "lengths", "seeds", "top_k", "temperature", "top_p", "min_p")


@dataclass
class StepInputs:
    """T tokens of B sequences, on the device. Padding belongs to the row that stands for nobody."""

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64, where K and V go
    page_table: torch.Tensor  # [B, P] int64
    query_starts: torch.Tensor  # [B + 1] int64, where each sequence's tokens start among the T, and T
    kv_lens: torch.Tensor  # [B] int64, all tokens of each sequence, those of this step included
    rows: torch.Tensor  # [B] int64, the row of each sequence
    last_rows: torch.Tensor | None  # [B] int64, where each sequence's last token is; None if each has one token
    seeds: torch.Tensor  # [B] int64
    temperature: torch.Tensor  # [B] fp32


class DeviceRows:
    """The rows, in tensors that stay where they are for as long as the engine lives.

    Args:
        max_rows: requests that may run side by side; one more row stands for nobody, and its page is the dummy.
        max_len: longest sequence in tokens.
        ops: the implementation of decode_rows and keep_tokens.
    """

    def __init__(self, max_rows: int, max_len: int, page_size: int, device: torch.device, ops: Any = reference) -> None:
        self.page_size, self.nobody, self.ops = page_size, max_rows, ops
        rows, width = max_rows + 1, -(-max_len // page_size)
        self._state = torch.zeros(rows * (width + 8), dtype=torch.int64, device=device)
        tables, *fields = torch.split(self._state, [rows * width] + [rows] * 8)
        self.page_tables = tables.view(rows, width)
        self._first = {name: (width + i) * rows for i, name in enumerate(_FIELDS)}  # where a field's row 0 lies
        self.order, self.tokens, self.lengths, self.seeds, self.top_k = fields[:5]
        fp64 = _has_fp64(device)  # else an fp32 takes half of the 64 bits that each entry of the state has
        reals = (each.view(torch.float64) if fp64 else each.view(torch.float32)[::2] for each in fields[5:])
        self.temperature, self.top_p, self.min_p = reals
        self._reals = "3d" if fp64 else "f4xf4xf4x"
        self._starts = torch.arange(rows + 1, device=device)
        self.order.fill_(self.nobody)
        # What the host knows of it.
        self._order = np.full(rows, self.nobody)  # which row comes at which place of a batch
        self._lengths = np.full(rows, -1)  # tokens of the row before its next one; -1 if the device has no valid one
        self._owners: list[Request | None] = [None] * rows
        self._requests, self._size, self._rows = list[Request](), 0, np.zeros(0, dtype=np.int64)  # of the last batch
        self._next = list[int]()  # where its requests go on
        self._changes, self._steps = self.mailboxes = Mailbox(device), Mailbox(device)

    def update(self, batch: Batch, size: int) -> None:
        """Send what changed since the step before, in one copy: page tables, newcomers, and who is in the batch.

        Args:
            size: places of the batch; those that nobody takes are filled with the row of nobody.
        """
        at, values = list[int](), list[int]()
        width = self.page_tables.shape[1]
        for request, first in batch.moved:
            if request.row < 0:
                continue
            at += range(request.row * width + first, request.row * width + len(request.pages))
            values += request.pages[first:]
            if self._owners[request.row] is not request:
                self._owners[request.row], self._lengths[request.row] = request, -1
                at += self._places(("seeds", "top_k", "temperature", "top_p", "min_p"), request.row)
                values += _sampling(request, self._reals)
        # A request that comes back to other rows comes with its first page.
        same = batch.requests == self._requests and size == self._size and all(first for _, first in batch.moved)
        if not same:
            self._requests, self._size = batch.requests, size
            self._rows = np.array([request.row for request in batch.requests])
            order = np.full(size, self.nobody)
            order[: len(self._rows)] = self._rows
            for i in np.flatnonzero(order != self._order[:size]).tolist():
                at += self._places(("order",), i)
                values.append(int(order[i]))
            self._order[:size] = order
        if same and batch.starts == self._next:  # each goes on where the device is, as in most steps
            self._lengths[self._rows] += 1
            self._next = [start + 1 for start in batch.starts]
        else:
            self._begin(batch, at, values)
        if at:
            self._state.index_copy_(0, *self._changes.send([at, values]))

    def _begin(self, batch: Batch, at: list[int], values: list[int]) -> None:
        """Send tokens and lengths where the device has others, and note what it will have after this step."""
        rows, starts = self._rows, np.array(batch.starts)
        for i in np.flatnonzero(self._lengths[rows] != starts).tolist():
            if batch.num_tokens[i] == 1:
                request, start = batch.requests[i], batch.starts[i]
                at += self._places(("tokens", "lengths"), request.row)
                values += [request.tokens[start], start]
        ends, known = starts + batch.num_tokens, [len(request.tokens) for request in batch.requests]
        self._lengths[rows] = np.where(ends >= known, ends, -1)
        self._next = self._lengths[rows].tolist()

    def follow(self, changes: np.ndarray, laid_out: np.ndarray, to: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Send what another rank's `update` and `lay_out` sent; returns the latter, if there was any."""
        if len(changes):
            self._state.index_copy_(0, *self._changes.send(np.split(changes, 2)))
        return self._steps.send([laid_out], to) if len(laid_out) else []

    def forget(self, batch: Batch) -> None:
        """A step failed, and what was sent for it may not have arrived: the next update sends it again.

        At that next update no token may be in flight, since the host sends every row's: whoever calls this takes all
        steps in before it.
        """
        self._requests, self._order[:], self._lengths[:] = [], -1, -1
        for request, _ in batch.moved:
            self._owners[request.row] = None

    def clear(self) -> None:
        """Nobody is in the batch, for a step that is run for its own sake."""
        self.order.fill_(self.nobody)
        self._order[:] = self.nobody
        self._requests = []

    def decode(self, size: int) -> StepInputs:
        """A step of one token for each of the first `size` places, from the rows alone."""
        rows = self.order[:size]
        given = (self.tokens, self.lengths, self.seeds, self.temperature)
        ids, positions, slots, kv_lens, table, seeds, temperature = self.ops.decode_rows(
            rows, self.page_tables, self.page_size, *given
        )
        starts = self._starts[: size + 1]
        return StepInputs(ids, positions, slots, table, starts, kv_lens, rows, None, seeds, temperature)

    def lay_out(self, batch: Batch, num_tokens: int, size: int, to: torch.Tensor | None = None) -> StepInputs:
        """A step of any numbers of tokens, sent from the host and padded to num_tokens and `size` places.

        Args:
            to: memory for it, of `laid_out_len` integers; None takes some that holds until the next call.
        """
        counts, starts, total = np.array(batch.num_tokens), np.array(batch.starts), batch.total_tokens
        ends, n = counts.cumsum(), len(batch.requests)
        laid_out = np.zeros(laid_out_len(num_tokens, size), dtype=np.int64)
        ids, positions, token_rows, last_rows, kv_lens, query_starts = np.split(laid_out, _cuts(num_tokens, size))
        ids[:total] = [id for request, start, n in batch for id in request.tokens[start : start + n] or [-1]]
        positions[:total] = np.arange(total) + np.repeat(starts + counts - ends, counts)
        token_rows[:total] = np.repeat(self._rows, counts)
        token_rows[total:] = self.nobody
        last_rows[:n], kv_lens[:n] = ends - 1, starts + counts
        query_starts[1 : n + 1], query_starts[n + 1 :] = ends, total
        [sent] = self._steps.send([laid_out], to)
        return self.laid_out(sent, num_tokens, size)

    def laid_out(self, sent: torch.Tensor, num_tokens: int, size: int) -> StepInputs:
        """The inputs in memory that `lay_out` has filled or will fill."""
        ids, positions, token_rows, last_rows, kv_lens, query_starts = sent.tensor_split(_cuts(num_tokens, size))
        rows, page_size = self.order[:size], self.page_size
        ids = torch.where(ids < 0, self.tokens[token_rows], ids)
        slots = self.page_tables[token_rows, positions // page_size] * page_size + positions % page_size
        seeds, temperature = self.seeds[rows], self.temperature[rows].float()
        table = self.page_tables.index_select(0, rows)
        return StepInputs(ids, positions, slots, table, query_starts, kv_lens, rows, last_rows, seeds, temperature)

    def filters(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """top_k, top_p and min_p of these rows."""
        return [self.top_k[rows], self.top_p[rows].float(), self.min_p[rows].float()]

    def keep(self, inputs: StepInputs, chosen: torch.Tensor) -> None:
        """Write the tokens [B] that a step chose, for the step after it."""
        self.ops.keep_tokens(chosen, inputs.rows, inputs.kv_lens, self.tokens, self.lengths)

    def _places(self, fields: Sequence[str], row: int) -> list[int]:
        """Where these fields of a row lie in the state."""
        return [self._first[field] + row for field in fields]


def laid_out_len(num_tokens: int, size: int) -> int:
    """Integers of a step that `DeviceRows.lay_out` lays out."""
    return 3 * num_tokens + 3 * size + 1


def _cuts(num_tokens: int, size: int) -> list[int]:
    return [num_tokens, 2 * num_tokens, 3 * num_tokens, 3 * num_tokens + size, 3 * num_tokens + 2 * size]


def _sampling(request: Request, reals: str = "3d") -> list[int]:
    params = request.params
    packed = struct.pack(reals, params.temperature, params.top_p, params.min_p)
    return [request.seed, params.top_k, *struct.unpack("3q", packed)]


def _has_fp64(device: torch.device) -> bool:
    return device.type != "mps"


class Mailbox:
    """Sends lists of integers to the device in one copy that nobody waits for, through memory that stays."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._gpu = device, device.type == "cuda"
        self._host = torch.empty(0, dtype=torch.int64)
        self.noted: list[np.ndarray] | None = None  # what was sent, for other ranks
        self._copied = torch.cuda.Event() if self._gpu else None  # type: ignore[no-untyped-call]

    def send(self, parts: Sequence[Sequence[int] | np.ndarray], to: torch.Tensor | None = None) -> list[torch.Tensor]:
        """The parts behind one another in `to`, or in memory that holds until the next call."""
        ends = list(accumulate(map(len, parts), initial=0))
        total = ends[-1]
        if self._copied:  # nothing else keeps the copy before from being still on its way out of this memory
            self._copied.synchronize()
        if total > len(self._host):
            self._host = torch.empty(2 * total, dtype=torch.int64, pin_memory=self._gpu)
            self._array, self._sent = self._host.numpy(), torch.empty_like(self._host, device=self.device)
        for (start, end), part in zip(pairwise(ends), parts, strict=True):
            self._array[start:end] = part
        if self.noted is not None:
            self.noted.append(self._array[:total].copy())
        to = self._sent[:total] if to is None else to
        to.copy_(self._host[:total], non_blocking=self._gpu)
        if self._copied:
            self._copied.record()
        return [to[start:end] for start, end in pairwise(ends)]

    def take(self) -> np.ndarray:
        """What was noted since the last call."""
        noted, self.noted = self.noted, []
        return np.concatenate(noted) if noted else np.zeros(0, dtype=np.int64)
