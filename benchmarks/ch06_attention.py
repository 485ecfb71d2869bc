"""Attention over pages on a GPU: bytes a second of decode, operations a second of prefill, beside the GPU's limits.

- decode: Triton, CUDA C++ and chapter 3's gather (launched from the host) by batch, context and page size.
- splits: what cutting sequences into splits is worth, in Triton.
- cuda_ladder: the six steps in CUDA C++.
- prefill: Triton over pages beside torch's attention over contiguous tensors.

The shape of Qwen3-0.6B: 16 query heads, 8 KV heads of 128, bf16. Pages are shuffled, and what no sequence owns holds
NaN. Bytes are K, V, q and the result once each: page tables and partial results are the kernels' own cost.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from minisgl_kernels import reference
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu import (
    arguments,
    checked,
    event_time,
    floor_us,
    graph_time,
    limits,
    measure,
    precompile,
    sets_for,
    table,
)
from minisgl.attention.torch_backend import TorchAttention
from minisgl.core import PagedRows
from minisgl.kvcache.mha_pool import MHAPool

HEADS, KV_HEADS, HEAD_DIM, DTYPE = 16, 8, 128, torch.bfloat16
SCALE = HEAD_DIM**-0.5
MOST_ERROR = 8e-3  # ‖difference‖ / ‖result‖: bf16 rounds the result and in Triton the weights, 2e-3 each on average
SPLITS = {1: (1, 2, 4, 8, 16, 32, 64, 128), 16: (1, 2, 3, 4, 5, 8, 16)}  # by batch


@dataclass(frozen=True)
class Case:
    """Sequences of a decode step."""

    name: str
    lens: tuple[int, ...]
    page_size: int = 16

    @property
    def context(self) -> int | str:
        """Of each sequence, or from the shortest allowed to the longest."""
        return self.lens[0] if len(set(self.lens)) == 1 else "100-2000"

    @property
    def bytes(self) -> int:
        """K and V of every token, q and the result."""
        return decode_bytes(self.lens)

    @property
    def width(self) -> int:
        """Columns of the page table."""
        return -(-max(self.lens) // self.page_size)


def decode_bytes(lens: Sequence[int]) -> int:
    """K and V of every token once, and q and the result of one token a sequence."""
    return DTYPE.itemsize * HEAD_DIM * (2 * KV_HEADS * sum(lens) + 2 * HEADS * len(lens))


def causal_flops(sequences: int, length: int) -> int:
    """Of two products of [length, length, head_dim] for each head, of which causality needs half."""
    return sequences * HEADS * 4 * HEAD_DIM * length**2 // 2


_ragged = random.Random(0)
CASES = [
    Case("256x1024", (1024,) * 256),
    Case("ragged", tuple(_ragged.randint(100, 2000) for _ in range(256))),
    Case("16x1024", (1024,) * 16),
    Case("1x32768", (32768,)),
    Case("256x600", (600,) * 256),
    *(Case("256x1024", (1024,) * 256, page_size) for page_size in (1, 64, 256)),
]
CURVES = {1: CASES[3], 16: CASES[2]}
PREFILL, PREFILL_PAGES = (2048,) * 8, (16, 256)


class Paged:
    """A step of sequences in shuffled pages of a pool of one layer, whose other slots hold NaN.

    Args:
        queries: new tokens of each sequence, which end it.
        width: columns of the page table; 0 for as many as the longest sequence needs.
    """

    def __init__(
        self, lens: Sequence[int], page_size: int, queries: int = 1, width: int = 0, seed: int = 0, device: str = "cuda"
    ) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        counts = [-(-length // page_size) for length in lens]
        spare = 2 + sum(counts) // 50
        where = torch.device(device)
        self.pool = MHAPool(1, 1 + sum(counts) + spare, page_size, KV_HEADS, HEAD_DIM, DTYPE, where)
        self.pool.kv.normal_(generator=generator)
        pages = 1 + torch.randperm(sum(counts) + spare, generator=generator, device=device)
        page_table = torch.zeros(len(lens), width or max(counts), dtype=torch.int64, device=device)
        for row, own in zip(page_table, pages[: sum(counts)].split(counts), strict=True):
            row[: len(own)] = own
        kv_lens = torch.tensor(lens, device=device)
        self.pool.kv[:, :, 0] = torch.nan
        self.pool.kv[:, :, pages[sum(counts) :]] = torch.nan
        behind = torch.arange(page_size, device=device) >= (kv_lens - 1).remainder(page_size).unsqueeze(1) + 1
        last_pages = page_table.gather(1, (kv_lens - 1).unsqueeze(1) // page_size)  # [B, 1]
        unused = (last_pages * page_size + torch.arange(page_size, device=device))[behind]
        self.keys, self.values = self.pool.layer(0)
        self.keys[unused], self.values[unused] = torch.nan, torch.nan
        starts = torch.arange(len(lens) + 1, device=device) * queries
        places = kv_lens.unsqueeze(1) - queries + torch.arange(queries, device=device)  # [B, queries]
        slots = page_table.gather(1, places // page_size) * page_size + places % page_size
        self.rows = PagedRows(slots.flatten(), page_table, [queries] * len(lens), list(lens), starts, kv_lens)
        shape = (len(lens) * queries, HEADS, HEAD_DIM)
        self.q = torch.empty(shape, dtype=DTYPE, device=device).normal_(generator=generator)

    @property
    def args(self) -> tuple[Any, ...]:
        """Of the paged attention ops."""
        rows, page_size = self.rows, self.pool.page_size
        return (
            self.q, self.keys, self.values, rows.page_table, page_size, rows.device_kv_lens, rows.query_starts, SCALE
        )  # fmt: skip

    def expected(self) -> torch.Tensor:
        """The result in fp64."""
        q, keys, values, *rest = self.args
        return reference.paged_attention(q.double(), keys.double(), values.double(), *rest)


def run_triton(paged: Paged) -> Callable[[], torch.Tensor]:
    from minisgl_kernels import triton

    return lambda: triton.paged_attention(*paged.args, max_queries=max(paged.rows.query_lens))


def run_cuda(paged: Paged, step: int = 6) -> Callable[[], torch.Tensor]:
    from minisgl_kernels import cuda

    return lambda: cuda.paged_decode(*paged.args, step=step)


def run_torch(paged: Paged) -> Callable[[], torch.Tensor]:
    """Chapter 3's backend; its groups are made once, as for all layers of a step."""
    backend, slots = TorchAttention(paged.pool, paged.rows), paged.rows.slots
    k, v = paged.keys[slots], paged.values[slots]  # what is stored is what is there
    return lambda: backend.forward(paged.q, k, v, 0, None)


RUN = {"triton": run_triton, "cuda": run_cuda, "torch": run_torch}


def splits_of(case: Case, backend: str) -> int:
    """Into how many splits a backend cuts the sequences."""
    if backend == "triton":
        from minisgl_kernels.triton.decode import launch_for

        return launch_for(len(case.lens) * KV_HEADS, HEAD_DIM * DTYPE.itemsize)[0]
    if backend == "cuda":
        from minisgl_kernels.cuda import splits_for as cuda_splits

        longest = case.width * case.page_size
        return cuda_splits(len(case.lens) * KV_HEADS, longest, HEADS // KV_HEADS, torch.device("cuda", 0))
    return 1


@contextmanager
def with_splits(count: int) -> Iterator[None]:
    """Within, Triton's decode cuts every sequence into this many splits; the rest of its launch stays as it is."""
    from minisgl_kernels.triton import decode as module

    choose = module.launch_for
    with patch.object(module, "launch_for", lambda *args: (count, *choose(*args)[1:])):
        yield


def speed(time: dict[str, float], moved: int, data: dict[str, Any]) -> dict[str, float]:
    """A decode's time, with its bytes a second and their share of a copy's."""
    tb_s = moved / time["us"] / 1e6
    return time | {"tb_s": tb_s, "fraction": tb_s / data["limits"]["copy_tb_s"]}


def inputs(case: Case) -> list[Paged]:
    """Sets of inputs to rotate over."""
    return [Paged(case.lens, case.page_size, seed=seed) for seed in range(sets_for(case.bytes))]


def decode(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Every case on every backend."""
    rows = []
    for case in CASES:
        sets = inputs(case)
        expected = [sets[0].expected()]
        for backend, run in RUN.items():
            error = checked(run(sets[0]), expected, MOST_ERROR)
            launches = [run(paged) for paged in sets]
            time = event_time(launches[0]) if backend == "torch" else graph_time(launches)
            rows.append(
                {"name": case.name, "backend": backend, "batch": len(case.lens), "context": case.context}
                | {"page_size": case.page_size, "splits": splits_of(case, backend), "bytes": case.bytes, "error": error}
                | speed(time, case.bytes, data)
            )
        del sets, launches
    table(rows, "name", "backend", "page_size", "splits", "us", "tb_s", "fraction", "error")
    return rows


def splits(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Two small batches in Triton by the number of splits."""
    rows = []
    for batch, case in CURVES.items():
        sets = inputs(case)
        expected = [sets[0].expected()]
        for count in SPLITS[batch]:
            with with_splits(count):
                error = checked(run_triton(sets[0]), expected, MOST_ERROR)
                time = graph_time([run_triton(paged) for paged in sets])
            row = {"batch": batch, "context": case.context, "splits": count, "error": error}
            rows.append(row | speed(time, case.bytes, data))
    table(rows, "batch", "context", "splits", "us", "tb_s", "fraction")
    return rows


def cuda_ladder(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps in CUDA C++ at batch 256 and context 1,024."""
    from minisgl_kernels.cuda import DTYPES, STEPS, driver

    rows, case = [], CASES[0]
    sets = inputs(case)
    expected = [sets[0].expected()]
    macros = (("DTYPE", DTYPES[DTYPE]), ("GROUP", HEADS // KV_HEADS), ("HEAD_DIM", HEAD_DIM))
    for step, file in STEPS.items():
        error = checked(run_cuda(sets[0], step), expected, MOST_ERROR)
        time = graph_time([run_cuda(paged, step) for paged in sets])
        registers = driver.load(file, macros, "decode", torch.cuda.current_device()).attribute(4)
        row = {"step": step, "file": file, "registers": registers, "error": error}
        rows.append(row | speed(time, case.bytes, data))
    table(rows, "step", "file", "us", "tb_s", "fraction", "registers")
    return rows


def prefill(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Prompts of 2,048 tokens, causal."""
    flops, rows = causal_flops(len(PREFILL), PREFILL[0]), []

    def add(backend: str, page_size: int | None, run: Callable[[], torch.Tensor], expected: torch.Tensor) -> None:
        error = checked(run, [expected], MOST_ERROR)
        time = graph_time([run])
        rate = flops / time["us"] / 1e6
        row = {"backend": backend, "page_size": page_size, "flops": flops, "error": error, "tflop_s": rate}
        rows.append(row | time | {"fraction_of_matmul": rate / data["limits"]["matmul_tflop_s"]})

    for page_size in PREFILL_PAGES:
        paged = Paged(PREFILL, page_size, queries=PREFILL[0])
        expected = paged.expected()
        add("triton", page_size, run_triton(paged), expected)
    slots = paged.rows.slots
    q, k, v = (
        each.unflatten(0, (len(PREFILL), -1)).transpose(1, 2).contiguous()  # [B, heads, S, head_dim]
        for each in (paged.q, paged.keys[slots], paged.values[slots])
    )
    for name, kind in (("sdpa_flash", SDPBackend.FLASH_ATTENTION), ("sdpa_cudnn", SDPBackend.CUDNN_ATTENTION)):

        def run(kind: SDPBackend = kind) -> torch.Tensor:
            with sdpa_kernel(kind):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)

        try:
            add(name, None, run, expected.unflatten(0, (len(PREFILL), -1)).transpose(1, 2))
        except RuntimeError as problem:  # this build of torch has no such kernel for this GPU
            rows.append({"backend": name, "page_size": None, "failed": str(problem).splitlines()[0]})
    table(rows, "backend", "page_size", "us", "tflop_s", "fraction_of_matmul", "error")
    return rows


def predictions(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The least time of each case, from its bytes or operations alone."""
    found: dict[str, dict[str, Any]] = {}
    for case in CASES:
        found[case.name] = {"bytes": case.bytes, "floor_us": floor_us(data["limits"], case.bytes)}
    flops = causal_flops(len(PREFILL), PREFILL[0])
    found["prefill"] = {"flops": flops, "floor_us": floor_us(data["limits"], 0, flops)}
    return [{"name": name} | row for name, row in found.items()]


def compile_decode(case: Case, backend: str, setting: int) -> None:
    """Launch once over few keys, with everything as it is that decides which kernel is compiled."""
    lens = [min(length, 20) for length in case.lens]
    paged = Paged(lens, case.page_size, width=case.width)
    if backend == "cuda":
        run_cuda(paged, setting)()
    else:
        with with_splits(setting):
            run_triton(paged)()
    torch.cuda.synchronize()


def compile_prefill(page_size: int) -> None:
    """The same for prompts."""
    run_triton(Paged([33] * len(PREFILL), page_size, queries=33, width=PREFILL[0] // page_size))()
    torch.cuda.synchronize()


def to_compile() -> list[tuple[Any, ...]]:
    """Calls, each of which compiles other kernels."""
    from minisgl_kernels.cuda import STEPS

    wanted = [(case, splits_of(case, "triton")) for case in CASES]
    wanted += [(case, count) for batch, case in CURVES.items() for count in SPLITS[batch]]
    kernels = [(compile_decode, case, "triton", count) for case, count in dict.fromkeys(wanted)]
    steps = [(compile_decode, CASES[0], "cuda", step) for step in STEPS]
    return [*((compile_prefill, page_size) for page_size in PREFILL_PAGES), *kernels, *steps]


PARTS = {"limits": lambda data: limits(), "predictions": predictions, "decode": decode, "splits": splits}
PARTS |= {"cuda_ladder": cuda_ladder, "prefill": prefill}


@torch.inference_mode()
def main() -> int:
    args = arguments(__doc__, "ch06_attention", list(PARTS))
    if not args.no_precompile:
        precompile(to_compile())
    only = dict.fromkeys(itertools.chain(["limits"], args.only))
    shape = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "dtype": str(DTYPE).removeprefix("torch.")}
    return measure(args.name, {part: PARTS[part] for part in only}, {"shape": shape})


if __name__ == "__main__":
    raise SystemExit(main())
