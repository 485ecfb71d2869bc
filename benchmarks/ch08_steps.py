"""A decode step by batch: launched kernel by kernel, replayed from a graph, with a step in flight, and with both.

For each of the four engines and each batch, at the same context: milliseconds of a step, of which the host works some
and waits some, and by a profile in a pass of its own the share of the time in which the GPU does nothing. On a CPU,
where host and device are one, only the code is tried: a stand-in plays the graph, and the host's time is all there is.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from tqdm import tqdm

from benchmarks import compare, idle
from benchmarks.gpu import table
from benchmarks.measure import finish, result_options
from benchmarks.record import save
from benchmarks.timing import synchronize
from minisgl.config import EngineConfig
from minisgl.core import Request, SamplingParams
from minisgl.engine.engine import Engine
from minisgl.llm import LLM

MODEL = str(Path(__file__).parent / "shapes/qwen3-0.6b")
BATCHES = [1, 4, 16, 64, 256]
SETTLE = 12  # steps with every request in them before the first that counts: captures and compiles are over
WAYS: dict[str, dict[str, Any]] = {  # the first is chapter 7's engine, the last chapter 8's
    "eager": {"chapter": 7},
    "graph": {"chapter": 8, "graphs": "lazy", "overlap": "off"},
    "overlap": {"chapter": 8, "graphs": "off", "overlap": "on"},
    "graph and overlap": {"chapter": 8, "graphs": "lazy", "overlap": "on"},
}
PARTS = ("plan", "launch", "retire")


def config(way: str, model: str, device: str = "auto", dtype: str = "auto") -> EngineConfig:
    """One of WAYS. All have the same budget, so that their prompts are computed in the same steps."""
    switches = dict(WAYS[way])
    chapter = switches.pop("chapter")
    if device == "cpu":  # the stand-in sees torch's ops only
        switches |= {"attention": "torch", "kernels": "torch"}
    same = {"model": model, "device": device, "dtype": dtype, "random_weights": True, "max_batch_tokens": 16_384}
    return EngineConfig.chapter(chapter, **same, **switches)


class HostClock:
    """Seconds that an engine's parts take on the host, and seconds in which the host waits for the GPU.

    Waits are in no part. They are the calls by which tokens come to the host, and copies to the GPU from memory that is
    not pinned, which first let the GPU come to them.
    """

    def __init__(self) -> None:
        self.waited, self.parts = 0.0, dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def watch(self, engine: Engine) -> Iterator[None]:
        """Within, the clock runs."""
        parts = {"plan": engine.scheduler, "launch": engine, "retire": engine.scheduler}
        with ExitStack() as stack:
            for name, owner in parts.items():
                stack.enter_context(patch.object(owner, name, self._part(name, getattr(owner, name))))
            for owner, name in ((torch.Tensor, "tolist"), (torch.Tensor, "to"), (torch.cuda.Event, "synchronize")):
                stack.enter_context(patch.object(owner, name, self._wait(getattr(owner, name))))
            yield

    def _part(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            waited, start = self.waited, time.perf_counter()
            result = call(*args, **kwargs)
            self.parts[name] += time.perf_counter() - start - (self.waited - waited)
            return result

        return timed

    def _wait(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = call(*args, **kwargs)
            taken = time.perf_counter() - start
            if call.__name__ == "to":
                to_gpu = args[0].device.type == "cpu" and result.is_cuda
                taken = max(0.0, taken - 1e-6 * idle.COPY_US) if to_gpu else 0.0
            self.waited += taken
            return result

        return timed


def requests(batch: int, context: int, steps: int, vocabulary: int) -> list[Request]:
    """Requests that have about `context` tokens in the middle of the steps that count, and end after the last."""
    random, prompt = Random(f"steps {batch} {steps}"), max(1, context - SETTLE - steps // 2)
    made = []
    for i in range(batch):  # of different lengths, so that they do not all come to a new page in the same step
        tokens = [random.randrange(vocabulary) for _ in range(max(1, prompt - i % 16))]
        answer = -(-batch * context // 8192) + SETTLE + steps + 8  # the first goes on while the others' prompts come
        params = SamplingParams(max_tokens=answer, temperature=0.6, ignore_eos=True, detokenize=False, seed=i)
        made.append(Request(i, tokens, params, seed=i))
    return made


def measure(llm: LLM, batch: int, context: int, steps: int) -> dict[str, Any]:
    """Medians over `steps` decode steps of `batch` requests, in milliseconds.

    Raises:
        ValueError: that many never ran side by side.
    """
    engine, clock = llm.engine, HostClock()
    assert isinstance(engine, Engine)
    asked = requests(batch, context, steps, llm.model.config.vocab_size)
    for request in asked:
        engine.add(request)
    settled = 0
    while settled < SETTLE and engine.has_work:
        settled = settled + 1 if len(engine.step()) == batch else 0
    before, rows = llm.stats(), []
    synchronize(llm.device)
    with clock.watch(engine):
        for _ in range(steps):
            waited, parts, start = clock.waited, dict(clock.parts), time.perf_counter()
            grown = len(engine.step())
            row = {"step": time.perf_counter() - start, "wait": clock.waited - waited}
            rows.append(row | {name: clock.parts[name] - parts[name] for name in PARTS})
            if grown != batch:
                raise ValueError(f"{grown} of {batch} requests got a token in a step: they must all run side by side")
    done = llm.stats()
    for request in asked:
        engine.abort(request.id)
    while engine.has_work:
        engine.step()
    ms = {name: 1000 * median(row[name] for row in rows) for name in rows[0]}
    return {
        "batch": batch,
        "step_ms": ms["step"],
        "slowest_ms": 1000 * max(row["step"] for row in rows),
        "host_ms": 1000 * median(row["step"] - row["wait"] for row in rows),
        "parts_ms": {name: ms[name] for name in PARTS},
        "wait_ms": ms["wait"],
        "steps": steps,
        "graph_steps": done["graph_steps"] - before["graph_steps"],
    }


def by_batch(way: str, args: argparse.Namespace, run: Callable[[LLM, int], Any]) -> dict[str, Any]:
    """What run says of an engine and each of args.batch; the engine's memory is free again afterwards."""
    with LLM(config(way, args.model, args.device, args.dtype)) as llm:
        found = {str(batch): run(llm, batch) for batch in args.batch}
    del llm
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default=MODEL, help="a folder, of which the config is all that is used")
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    options.add_argument("--dtype", default="auto", help="as of `minisgl generate` (default: %(default)s)")
    options.add_argument("--batch", type=int, nargs="+", default=BATCHES, help="default: %(default)s")
    options.add_argument("--context", type=int, default=512, help="tokens of a request (default: %(default)s)")
    options.add_argument("--steps", type=int, default=48, help="that count (default: %(default)s)")
    options.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS), help="default: all")
    options.add_argument("--no-idle", action="store_true", help="no profile of the GPU")
    result_options(options, "ch08_steps")
    return options


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    old = compare.read(args.compare) if args.compare else None
    ways: dict[str, dict[str, dict[str, Any]]] = {way: {} for way in args.way}
    for way in (bar := tqdm(ways, unit="engine")):
        bar.set_description(way)
        ways[way] = by_batch(way, args, lambda llm, batch: measure(llm, batch, args.context, args.steps))
    data = {"model": Path(args.model).name, "context": args.context, "switches": WAYS, "ways": ways}
    # In engines of their own, after all times: a profiler may leave something behind that costs time.
    profiled = [] if args.no_idle or args.device == "cpu" else args.way
    if profiled:
        save(args.name, data, args.device, args.json)  # a profile that does not end costs no times
    for way in (bar := tqdm(profiled, unit="profile", disable=not profiled)):
        bar.set_description(way)
        for batch, found in by_batch(way, args, lambda llm, batch: idle.measure(llm, batch, args.context)).items():
            ways[way][batch]["idle"] = found
    flat = [{"way": way} | (row.get("idle") or {}) | row for way, rows in ways.items() for row in rows.values()]
    table(flat, "way", "batch", "step_ms", "host_ms", "wait_ms", "kernel_ms", "kernels_per_step", "idle_share")
    finish(args, data, args.device, old)


if __name__ == "__main__":
    main()
