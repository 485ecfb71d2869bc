"""All-reduce of small messages over peer memory, alone or with the residual addition and RMSNorm behind it: one kernel.

Each rank owns an inbox, which the others write: for each rank a slot that it alone writes. A call puts x into its slot
of every inbox, reads its own inbox until all slots are there, and adds them up: one way through the links, no hops, no
flags. What is not there yet is told from data by a value that is never sent, the 16 bits of -0.0: a -0.0 is sent as
+0.0. (In fp32 that is two of them, a number below all normal ones, in whose place 0 is sent.)

Inboxes have three generations, which take turns. Call g uses generation g % 3, and clears that of call g - 1, so that
call g + 2 finds it clear. Why that is enough:

- A call ends when it has all ranks' data of this call. So when rank B is in call g + 1, every rank has begun call g
  and ended call g - 1: no rank is ahead of another by more than one call.
- B writes to A's generation of call g + 1 while A is in call g or later. A cleared it in call g - 1, which is over.
- In call g, A clears the generation of call g - 1, which A has read, being in order, and which the others write in call
  g + 2, for which they need A's data of call g + 1.

Which generation is next, and how much of the last one to clear, is kept on the device, and moved on by the last program
of a launch. So launches can be in CUDA graphs, and graphs and single launches can follow each other in any order, as
long as all ranks run the same ones in the same order.

A program takes one row, writes it, and waits for the others' same row. Programs start in order, so the first row that
is not yet summed is being worked on by every rank. To be let in before the kernel before is over (triton.pdl) changes
nothing here: nothing is read, written or cleared before that is over.

Stores are plain, which a GPU writes through to the memory they are for; loads are volatile, so each goes to the memory.
Both move 16 bytes at once, but no more than each 16 bits must arrive whole.

Ideas: NCCL's LL protocol, in which flags travel with the data; the one-shot Lamport all-reduce with RMSNorm of
TensorRT-LLM (kernels/communicationKernels/allReduceFusionKernels.cu), with three buffers and -0.0 for "not yet".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from minisgl_kernels.triton.cases import CompileCase, each_dtype, refuse, require
from minisgl_kernels.triton.pdl import overlap, wait_for_previous

GENERATIONS = 3
CLEAR = 0x8000  # each 16 bits of an inbox where nothing has arrived
GENERATION, USED_BYTES, FINISHED = range(3)  # of an inbox's state
_LONGEST = 16_384  # numbers of a row
_CLEAR_16, _CLEAR_32 = tl.constexpr(-0x8000), tl.constexpr(-0x7FFF8000)  # CLEAR once and twice, as integers
_GENERATION, _USED, _FINISHED = (tl.constexpr(i) for i in range(3))


@dataclass(frozen=True)
class Inbox:
    """What a rank's kernels know of the group's memory.

    Args:
        pointers: [size] int64, on the rank's device: where each rank's inbox is, as this rank reaches it. An inbox is
            [GENERATIONS, size, slot_bytes] bytes, at first all CLEAR.
        state: [3] int32, on the same device, at first 0: the generation, 0 … 2, of the next call; the bytes of a slot
            that the last one used; and how many programs of a launch are finished.
        broken: [1] int32, in memory of the host that the device reads (pinned), so that it can be set while the device
            and its driver are busy: a 1 ends all waiting, with sums that mean nothing.
        slot_bytes: the largest x; a multiple of 16.
    """

    pointers: torch.Tensor
    state: torch.Tensor
    broken: torch.Tensor
    rank: int
    slot_bytes: int

    def takes(self, x: torch.Tensor) -> bool:
        """Whether x [..., hidden] is small enough, and its rows are: a program takes a whole one."""
        return x.nbytes <= self.slot_bytes and x.dim() > 0 and x.shape[-1] <= _LONGEST


@triton.jit(do_not_specialize=["rank", "rows"], do_not_specialize_on_alignment=["inboxes", "state", "broken"])
def all_reduce_kernel(
    x,  # [rows, HIDDEN]
    residual,  # [rows, HIDDEN], or None: the sum is the stream
    weight,  # [HIDDEN], or None: no norm
    normed_out,  # [rows, HIDDEN], or None: no norm
    total_out,  # [rows, HIDDEN]
    inboxes,  # [SIZE]
    state,  # [3]
    broken,  # [1]
    x_stride,
    residual_stride,
    rank,
    rows,
    eps,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """One program: one row, its own and the other ranks'."""
    wait_for_previous(PDL)
    wide: tl.constexpr = x.dtype.element_ty == tl.float32
    bits_type: tl.constexpr = tl.int32 if wide else tl.int16
    clear: tl.constexpr = _CLEAR_32 if wide else _CLEAR_16
    item_bytes: tl.constexpr = 4 if wide else 2
    slot: tl.constexpr = SLOT_BYTES // item_bytes

    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    generation = tl.load(state + _GENERATION, volatile=True)
    used = tl.cdiv(tl.load(state + _USED, volatile=True), 16) * (16 // item_bytes)  # whole 16 bytes, cleared at once

    given = tl.load(x + row.to(tl.int64) * x_stride + column, mask=inside, other=0.0)
    bits = given.to(bits_type, bitcast=True)
    bits = tl.where(bits == clear, 0, bits)
    at = row * HIDDEN + column
    for i in tl.static_range(SIZE):
        peer = (rank + i) % SIZE  # so that not all write to the same one at the same time
        theirs = _inbox(inboxes, peer, bits_type)
        tl.store(theirs + (generation * SIZE + rank) * slot + at, bits, mask=inside)

    mine = _inbox(inboxes, rank, bits_type)
    before = mine + (generation + 2) % 3 * (SIZE * slot)
    for start in range(row * BLOCK, used, tl.num_programs(0) * BLOCK):
        old = start + column
        for r in tl.static_range(SIZE):
            tl.store(before + r * slot + old, tl.full((BLOCK,), clear, bits_type), mask=old < used)

    now = mine + generation * (SIZE * slot)
    total = tl.zeros((BLOCK,), tl.float32)
    missing, looks = 1, 0
    while missing > 0:
        absent = tl.zeros((BLOCK,), tl.int32)
        total = tl.zeros((BLOCK,), tl.float32)
        for r in tl.static_range(SIZE):  # in the order of ranks, so that all have the same bits
            part = tl.load(now + r * slot + at, mask=inside, other=0, volatile=True)
            absent += (part == clear).to(tl.int32)
            total += part.to(x.dtype.element_ty, bitcast=True).to(tl.float32)
        looks += 1
        given_up = tl.load(broken, mask=looks % 64 == 0, other=0, volatile=True)  # far away, so not every time
        missing = tl.max(tl.where(given_up > 0, 0, absent), axis=0)  # warps may see different things, but one maximum
    total = total.to(given.dtype)

    out = row.to(tl.int64) * HIDDEN + column
    if residual is not None:
        kept = tl.load(residual + row.to(tl.int64) * residual_stride + column, mask=inside, other=0.0)
        total = (kept.to(tl.float32) + total.to(tl.float32)).to(given.dtype)
    tl.store(total_out + out, total, mask=inside)
    if weight is not None:  # as add_rms_norm_kernel
        gain = tl.load(weight + column, mask=inside, other=0.0)
        total32 = tl.where(inside, total.to(tl.float32), 0.0)
        inverse_rms = tl.rsqrt(tl.sum(total32 * total32, axis=0) / HIDDEN + eps)
        tl.store(normed_out + out, (total32 * inverse_rms).to(given.dtype) * gain, mask=inside)

    tl.debug_barrier()  # all warps know the generation: it may change now
    if tl.atomic_add(state + _FINISHED, 1, sem="relaxed") == tl.num_programs(0) - 1:
        tl.store(state + _GENERATION, (generation + 1) % 3)
        tl.store(state + _USED, rows * (HIDDEN * item_bytes))
        tl.store(state + _FINISHED, 0)


@triton.jit
def _inbox(inboxes, rank, bits_type: tl.constexpr):
    """Where a rank's inbox begins: at a multiple of 16 bytes, which the compiler cannot know of a loaded address."""
    address = tl.load(inboxes + rank)
    return tl.multiple_of(address.to(tl.pointer_type(bits_type)), 16)


def all_reduce(x: torch.Tensor, inbox: Inbox) -> torch.Tensor:
    """The sum of all ranks' x [..., hidden], taken in fp32 and rounded once, the same bits on every rank.

    Raises:
        ValueError: x is too large (`Inbox.takes`), or what `cases.require` refuses.
    """
    return _launch(x, None, None, 0.0, inbox)[1]


def all_reduce_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, inbox: Inbox
) -> tuple[torch.Tensor, torch.Tensor]:
    """`norm.add_rms_norm` of the sum of all ranks' x: (normalised, residual + sum), rounded as by the two in turn.

    Raises:
        ValueError: shapes differ, x is too large (`Inbox.takes`), or what `cases.require` refuses.
    """
    return _launch(x, residual, weight, eps, inbox)


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, eps: float, inbox: Inbox
) -> tuple[Any, torch.Tensor]:
    op = "all_reduce" if weight is None else "all_reduce_add_rms_norm"
    require(op, x, residual, weight)
    if residual is not None and x.shape != residual.shape:
        refuse(op, f"x is {list(x.shape)} and the residual {list(residual.shape)}")
    if not inbox.takes(x):
        most = f"{inbox.slot_bytes:,} bytes, in rows of {_LONGEST:,}"
        raise ValueError(f"{op} of {list(x.shape)} in {x.dtype}: an inbox takes at most {most}")
    total = x.new_empty(x.shape)
    normed = None if weight is None else x.new_empty(x.shape)
    if not x.numel():
        return normed, total
    hidden = x.shape[-1]
    x = x.reshape(-1, hidden)
    if residual is not None:
        residual = residual.reshape(-1, hidden)
    all_reduce_kernel[len(x),](
        x, residual, weight, normed, total, inbox.pointers, inbox.state, inbox.broken,
        x.stride(0), 0 if residual is None else residual.stride(0), inbox.rank, len(x), eps,
        hidden, len(inbox.pointers), inbox.slot_bytes,
        **_block(hidden, x.itemsize), **overlap(all_reduce_kernel, x.device),
    )  # fmt: skip
    return normed, total


def _block(hidden: int, item_bytes: int) -> dict[str, int]:
    """A row's padded length, and the warps with which each thread moves 16 bytes of it, or in a long one a little more:
    the fewer accesses follow each other, the sooner a short message is through."""
    block = triton.next_power_of_2(hidden)
    return {"BLOCK": block, "num_warps": min(max(block * item_bytes // 512, 1), 16)}


def _cases() -> Iterator[CompileCase]:
    types = {"x": "*", "residual": "*", "weight": "*", "normed_out": "*", "total_out": "*", "inboxes": "*i64"}
    types |= {"state": "*i32", "broken": "*i32", "x_stride": "i32/16", "residual_stride": "i32/16"}
    types |= {"rank": "i32", "rows": "i32", "eps": "fp32"}
    for typed in each_dtype(types):
        item_bytes = 4 if typed["x"] == "*fp32" else 2
        for hidden, size, left_out in (
            (1024, 2, ()),
            (5120, 8, ()),
            (576, 3, ("residual",)),
            (4096, 4, ("residual", "weight", "normed_out")),
        ):
            kept = {name: kind for name, kind in typed.items() if name not in left_out}
            constants: dict[str, Any] = {"HIDDEN": hidden, "SIZE": size, "SLOT_BYTES": 1 << 19}
            blocks = _block(hidden, item_bytes)
            num_warps = blocks.pop("num_warps")
            yield CompileCase(all_reduce_kernel, kept, constants | blocks | dict.fromkeys(left_out), num_warps)


COMPILE_CASES = list(_cases())
