"""The beginning and the end of a decode step: from the rows that the device keeps to its inputs, and back.

In torch's ops these are a dozen kernels of a microsecond or two, most of it launches; here each is one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl_kernels.triton.cases import CompileCase, refuse
from minisgl_kernels.triton.pdl import overlap, wait_for_previous

_BLOCK = 128
# Parts of larger tensors, which may begin anywhere: another alignment would be another compilation.
_ROWS = ["order", "tokens", "lengths", "seeds", "temperatures"]
_KEPT = ["chosen", "rows", "kv_lens", "tokens", "lengths"]
_OUT = ["ids_out", "positions_out", "slots_out", "kv_lens_out", "seeds_out", "table_out"]


@triton.jit(do_not_specialize_on_alignment=["page_tables", *_ROWS, *_OUT])
def decode_rows_kernel(
    order, page_tables, tokens, lengths, seeds, temperatures,
    ids_out, positions_out, slots_out, kv_lens_out, seeds_out, temperatures_out, table_out,
    WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """One program: one place of the batch. Of its page table only the pages in use are copied."""
    wait_for_previous(PDL)
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(order + place)
    position = tl.load(lengths + row)
    table = page_tables + row * WIDTH
    page = tl.load(table + position // PAGE_SIZE)
    tl.store(ids_out + place, tl.load(tokens + row))
    tl.store(positions_out + place, position)
    tl.store(slots_out + place, page * PAGE_SIZE + position % PAGE_SIZE)
    tl.store(kv_lens_out + place, position + 1)
    tl.store(seeds_out + place, tl.load(seeds + row))
    tl.store(temperatures_out + place, tl.load(temperatures + row).to(tl.float32))
    used = (position // PAGE_SIZE + 1).to(tl.int32)
    for start in range(0, used, BLOCK):
        at = start + tl.arange(0, BLOCK)
        pages = tl.load(table + at, mask=at < used, other=0)
        tl.store(table_out + place * WIDTH + at, pages, mask=at < used)


def decode_rows(
    order: torch.Tensor,
    page_tables: torch.Tensor,
    page_size: int,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    seeds: torch.Tensor,
    temperatures: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """See `reference.decode_rows`. Beyond the pages in use the page tables that it returns are not written.

    Raises:
        ValueError: page_tables is not contiguous.
    """
    if not page_tables.is_contiguous():
        refuse("decode_rows", "page_tables must be contiguous")
    size, width = len(order), page_tables.shape[1]
    integers = order.new_empty(5, size).unbind()
    temperature, table = temperatures.new_empty(size, dtype=torch.float32), page_tables.new_empty(size, width)
    decode_rows_kernel[size,](
        order, page_tables, tokens, lengths, seeds, temperatures, *integers, temperature, table,
        width, page_size, _BLOCK, num_warps=1, **overlap(decode_rows_kernel, order.device),
    )  # fmt: skip
    ids, positions, slots, kv_lens, row_seeds = integers
    return ids, positions, slots, kv_lens, table, row_seeds, temperature


@triton.jit(do_not_specialize=["size", "nobody"], do_not_specialize_on_alignment=_KEPT)
def keep_tokens_kernel(
    chosen, rows, kv_lens, tokens, lengths, size, nobody, BLOCK: tl.constexpr, PDL: tl.constexpr = False
):
    """Write BLOCK tokens and lengths to their rows; nothing is kept of nobody."""
    wait_for_previous(PDL)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + place, mask=place < size, other=nobody)
    somebody = row < nobody
    token = tl.load(chosen + place, mask=place < size, other=0)
    tl.store(tokens + row, tl.maximum(token, 0), mask=somebody)
    tl.store(lengths + row, tl.load(kv_lens + place, mask=place < size, other=0), mask=somebody)


def keep_tokens(
    chosen: torch.Tensor, rows: torch.Tensor, kv_lens: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor
) -> None:
    """See `reference.keep_tokens`."""
    size = len(rows)
    keep_tokens_kernel[triton.cdiv(size, _BLOCK),](
        chosen, rows, kv_lens, tokens, lengths, size, len(tokens) - 1, _BLOCK,
        num_warps=1, **overlap(keep_tokens_kernel, rows.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["positions"])
def rope_angles_kernel(
    positions, inv_freq, cos_out, sin_out, tokens, magnitude,
    PAIRS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Cosines and sines of BLOCK_T tokens."""
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    pair = tl.arange(0, BLOCK_P)[None, :]
    inside = (token < tokens) & (pair < PAIRS)
    position = tl.load(positions + token, mask=token < tokens, other=0).to(tl.float32)
    angle = position * tl.load(inv_freq + pair, mask=pair < PAIRS, other=0.0)
    place = token * PAIRS + pair
    tl.store(cos_out + place, (tl.cos(angle) * magnitude).to(cos_out.dtype.element_ty), mask=inside)
    tl.store(sin_out + place, (tl.sin(angle) * magnitude).to(sin_out.dtype.element_ty), mask=inside)


def rope_angles(
    positions: torch.Tensor, inv_freq: torch.Tensor, magnitude: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.rope_angles`."""
    tokens, pairs = len(positions), len(inv_freq)
    cos, sin = inv_freq.new_empty(2, tokens, pairs, dtype=dtype).unbind()
    block_p = triton.next_power_of_2(pairs)
    block_t = max(1, 512 // block_p)
    rope_angles_kernel[triton.cdiv(tokens, block_t),](
        positions, inv_freq, cos, sin, tokens, magnitude, pairs, block_t, block_p,
        num_warps=4, **overlap(rope_angles_kernel, positions.device),
    )  # fmt: skip
    return cos, sin


_INT = "*i64"
COMPILE_CASES = [
    CompileCase(
        decode_rows_kernel,
        dict.fromkeys(("order", "page_tables", "tokens", "lengths", "seeds"), _INT)
        | {"temperatures": "*fp64", "temperatures_out": "*fp32", "table_out": _INT}
        | dict.fromkeys(("ids_out", "positions_out", "slots_out", "kv_lens_out", "seeds_out"), _INT),
        {"WIDTH": 2560, "PAGE_SIZE": 16, "BLOCK": _BLOCK},
        num_warps=1,
    ),
    CompileCase(
        keep_tokens_kernel,
        dict.fromkeys(("chosen", "rows", "kv_lens", "tokens", "lengths"), _INT) | {"size": "i32", "nobody": "i32"},
        {"BLOCK": _BLOCK},
        num_warps=1,
    ),
    CompileCase(
        rope_angles_kernel,
        {"positions": _INT, "inv_freq": "*fp32", "cos_out": "*bf16", "sin_out": "*bf16"}
        | {"tokens": "i32", "magnitude": "fp32"},
        {"PAIRS": 64, "BLOCK_T": 8, "BLOCK_P": 64},
    ),
]
