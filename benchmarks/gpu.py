"""Times kernels on a GPU, beside what that GPU allows.

A CUDA graph holds many launches, so that the host's time does not count. They take turns over several sets of inputs,
and outputs live as long as a turn, so that the L2 cache holds nothing that the next launch needs. Knows no kernel.
"""

from __future__ import annotations

import argparse
import math
import os
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.record import save

MOVED_BY_A_TURN = 400e6  # bytes: several times the L2 cache of any GPU so far
REPLAY_MS, MOST_LAUNCHES = 20.0, 512  # of one graph, about
Launch = Callable[[], object]


def limits(repeats: int = 7) -> dict[str, float]:
    """A copy of 4 GB, reads and writes counted, and a large bf16 matrix product of random numbers.

    Outside a graph: a copy is a node of another kind there, and slower.
    """
    source = torch.empty(2**31, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    copy_us = event_time(lambda: target.copy_(source), repeats)["us"]
    a, b = torch.randn(2, 8192, 8192, device="cuda").bfloat16().unbind()
    product_us = event_time(lambda: [a @ b for _ in range(5)], repeats)["us"] / 5
    return {"copy_tb_s": 2 * source.nbytes / copy_us / 1e6, "matmul_tflop_s": 2 * 8192**3 / product_us / 1e6}


def floor_us(limits: Mapping[str, float], moved: float, flops: float = 0) -> float:
    """The least microseconds in which these bytes are moved and these operations done, side by side."""
    return max(moved / limits["copy_tb_s"], flops / limits["matmul_tflop_s"]) / 1e6


def sets_for(moved: float) -> int:
    """How many sets of inputs the launches rotate over, if one launch moves this many bytes."""
    return max(1, min(64, math.ceil(MOVED_BY_A_TURN / moved)))


def graph_time(launches: Sequence[Launch], repeats: int = 9) -> dict[str, float]:
    """Microseconds of one launch, the median, least and most of several replays of a graph of many."""
    stream = _stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and lets ops keep what belongs to a stream outside of the graph
        for launch in launches:
            launch()
        one_ms = event_time(lambda: [launch() for launch in launches[:8]], 1)["us"] / 1000 / len(launches[:8])
    turns = math.ceil(min(REPLAY_MS / one_ms, MOST_LAUNCHES) / len(launches))
    alive: deque[object] = deque(maxlen=len(launches))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(turns):
            for launch in launches:
                alive.append(launch())
    samples = []
    for _ in range(repeats + 1):
        graph.replay()  # keeps the GPU busy while the one that counts is on its way
        samples.append(_elapsed_us(graph.replay) / turns / len(launches))
    del graph, alive
    torch.cuda.empty_cache()
    return _spread(samples[1:])


def event_time(run: Launch, repeats: int = 7) -> dict[str, float]:
    """Microseconds between two events around run, launched from the host; as graph_time otherwise."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    return _spread([_elapsed_us(run) for _ in range(repeats)])


@contextmanager
def poisoned() -> Iterator[None]:
    """Within, new tensors hold NaN (integers: the largest), so that what is never written shows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """‖actual - expected‖ / ‖expected‖ in fp64; NaN if either holds one."""
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm())


def checked(run: Callable[[], Any], expected: Sequence[torch.Tensor], most: float) -> float:
    """The largest relative error of what run returns, a tensor or several, into poisoned memory.

    Raises:
        ValueError: it is above `most`, or NaN.
    """
    with poisoned():
        outputs = run()
    outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    errors = torch.tensor([relative_error(out, ref) for out, ref in zip(outputs, expected, strict=True)])
    error = float(errors.max())  # max keeps a NaN
    if not error <= most:
        raise ValueError(f"the result is {error:.1e} from its reference, {most:.0e} is allowed: not worth timing")
    return error


def precompile(calls: Sequence[tuple[Any, ...]], workers: int = 8) -> None:
    """Do each call, a function and its arguments, in another process: what they compile stays in the caches on disk.

    A failure is printed only: the same kernel will fail again where it is measured.
    """
    workers = max(1, min(workers, len(calls), os.cpu_count() or 1))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(*call): call for call in calls}
        for done in tqdm(as_completed(futures), total=len(futures), desc="compile"):
            if problem := done.exception():
                tqdm.write(f"{futures[done]}: {problem}")


def measure(name: str, parts: Mapping[str, Callable[[dict[str, Any]], Any]], data: dict[str, Any]) -> int:
    """Run the parts in turn and save after each: data[part] is what part(data) returns.

    A part that fails does not cost the others; it is named in data["failed"]. Returns how many did.
    """
    failed: dict[str, str] = {}
    data["packages"] = {package: _version(package) for package in ("triton", "cuda-core", "nvidia-cuda-nvrtc")}
    for part, run in (bar := tqdm(parts.items())):
        bar.set_description(part)
        try:
            data[part] = run(data)
        except Exception as problem:
            traceback.print_exc()
            failed[part] = data.setdefault("failed", failed)[part] = f"{type(problem).__name__}: {problem}"[:300]
        path = save(name, data, "cuda")
    print(path)
    return len(failed)


def arguments(doc: str | None, name: str, parts: Sequence[str]) -> argparse.Namespace:
    """The options of a benchmark that needs a GPU. Ends the process with a message if there is none."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts), help="parts (default: all)")
    parser.add_argument("--no-precompile", action="store_true", help="compile each kernel when it is first launched")
    parser.add_argument("--name", default=name, help="of the result file (default: %(default)s)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures an NVIDIA GPU, and torch finds none")
    return args


def table(rows: Sequence[Mapping[str, Any]], *columns: str) -> None:
    """Print some columns of the rows, numbers to four digits."""
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for line in (columns, *cells):
        tqdm.write("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


@cache
def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def _elapsed_us(run: Launch) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(1000 * start.elapsed_time(end))


def _spread(samples: Sequence[float]) -> dict[str, float]:
    return {"us": median(samples), "us_min": min(samples), "us_max": max(samples)}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
