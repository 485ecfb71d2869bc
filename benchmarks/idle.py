"""What the GPU does in decode steps, and when it does nothing: from a profile of a few, in a pass of their own.

The profiler costs the host a little at each call of CUDA. An engine that starts kernel by kernel is slowed by it, so
its idle share is somewhat above that of an unprofiled run. A graph is one call.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.measure import Steps
from minisgl.core import Request, SamplingParams
from minisgl.llm import LLM

SETTLE = 16  # steps with every request in them before the profile starts: compiles are over, and pages have been added
STEPS = 24  # that are profiled; of these the first quarter is left out, in which the profiler is still starting
WAITS = re.compile(r"(Stream|Event|Device|Ctx)Synchronize")  # calls in which the host only waits
BETWEEN_KERNELS_US = 5  # the GPU alone needs less from one kernel to the next
COPY_US = 10  # a copy that takes longer waits too: to memory that is not pinned, it first lets the GPU come to it


@dataclass(frozen=True)
class Span:
    """A kernel on the GPU or a call of CUDA on the host, in microseconds of the trace's clock."""

    name: str
    start: float
    us: float
    launched: float = 0.0  # a kernel's: when the host asked for it

    @property
    def end(self) -> float:
        return self.start + self.us


@dataclass(frozen=True)
class Profile:
    """Steps of an engine. Step i is on the host between marks[i] and marks[i + 1]."""

    kernels: list[Span]
    calls: list[Span]
    marks: list[float]
    step_ms: float = 0.0  # of the steps just before these

    def step(self, i: int) -> Profile:
        """What the host did in step i and the kernels that it asked for then; these may run later."""
        start, end = self.marks[i], self.marks[i + 1]
        kernels = [kernel for kernel in self.kernels if start <= kernel.launched < end]
        return Profile(kernels, [call for call in self.calls if start <= call.start < end], [start, end])


def answer_tokens(batch: int, prompt: int, steps: int) -> int:
    """An answer so long that the first request still runs when the last has been profiled, prefills of 512 a step."""
    return math.ceil(batch * prompt / 512) + SETTLE + steps + 32


def profile_decode(llm: LLM, batch: int, prompt: int, steps: int = STEPS) -> Profile | None:
    """Profile steps in which `batch` requests decode side by side, behind random prompts of `prompt` tokens.

    Returns:
        None without an NVIDIA GPU, or when the engine never ran that many side by side.
    """
    if llm.device.type != "cuda":
        return None
    answer = answer_tokens(batch, prompt, steps)
    prompt = max(1, min(prompt, llm.model.config.max_position_embeddings - answer))
    random, vocabulary = Random(f"idle {batch}"), llm.model.config.vocab_size
    prompts = [[random.randrange(min(vocabulary, 10_000)) for _ in range(prompt)] for _ in range(batch)]
    params = [
        SamplingParams(max_tokens=answer, temperature=0.6, ignore_eos=True, detokenize=False, seed=i)
        for i in range(batch)
    ]
    recorder = profile(activities=[ProfilerActivity.CUDA])
    settled, marks, quiet = 0, list[int](), list[float]()

    def after(grown: list[Request]) -> None:
        nonlocal settled
        settled = settled + 1 if len(grown) == batch else 0
        if settled == SETTLE and not marks:
            quiet.extend(end for end, _ in noted.steps[-SETTLE // 2 :])
            recorder.start()
        if (settled >= SETTLE or marks) and len(marks) <= steps:
            marks.append(time.time_ns())
            if len(marks) == steps + 1:
                torch.cuda.synchronize(llm.device)
                recorder.stop()
                for request in grown:
                    llm.abort(request.id)

    with Steps(llm, after) as noted:
        llm.generate(prompts, params, progress=False)
    if len(marks) <= steps:
        if marks:
            recorder.stop()
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorder.export_chrome_trace(str(path))
        found = read(json.loads(path.read_text()), marks)
    return replace(found, step_ms=1000 * median(later - sooner for sooner, later in pairwise(quiet)))


def read(trace: Mapping[str, Any], marks_ns: Sequence[int]) -> Profile:
    """A Chrome trace of torch's profiler and the steps' boundaries by time.time_ns, on one clock.

    Raises:
        ValueError: there is no kernel in it.
    """
    base = trace.get("baseTimeNanoseconds", 0)
    calls, kernels, asked = list[Span](), list[tuple[Span, Any]](), dict[Any, float]()
    for event in trace["traceEvents"]:
        kind, correlation = event.get("cat"), event.get("args", {}).get("correlation")
        if kind not in ("kernel", "cuda_runtime", "cuda_driver"):
            continue
        span = Span(_short(event["name"]), float(event["ts"]), float(event["dur"]))
        if kind == "kernel":
            kernels.append((span, correlation))
        else:
            calls.append(span)
            asked[correlation] = span.start
    if not kernels:
        raise ValueError("the profiler saw no kernel: this process may not use the GPU's counters (CUPTI)")
    kernels.sort(key=lambda pair: pair[0].start)
    launched, known = kernels[0][0].start, list[Span]()
    for kernel, correlation in kernels:  # one whose call was not seen goes with the one before it
        launched = asked.get(correlation, launched if asked else kernel.start)
        known.append(replace(kernel, launched=launched))
    return Profile(known, sorted(calls, key=lambda call: call.start), [(mark - base) / 1000 for mark in marks_ns])


def gaps_us(spans: Sequence[Span], start: float, end: float) -> list[float]:
    """The times between start and end in which none of the spans runs; they may overlap, in any order."""
    gaps, reached = list[float](), start
    for span in sorted(spans, key=lambda span: span.start):
        if min(span.start, end) > reached:
            gaps.append(min(span.start, end) - reached)
        reached = max(reached, span.end)
    return [*gaps, end - reached] if end > reached else gaps


def waited_us(call: Span) -> float:
    """The part of a call in which the host waits for the GPU."""
    if WAITS.search(call.name):
        return call.us
    return max(0.0, call.us - COPY_US) if "Memcpy" in call.name else 0.0


def summary(found: Profile) -> dict[str, float]:
    """Figures of a step, over the profiled steps but for the first quarter and the last.

    idle_share: of the GPU's time from the first kernel of one step to that of another, the part without a kernel.
    starved_share: the part of it in gaps so long that the GPU must have waited for the host.
    host_ms: the median step on the host, without the calls that wait for the GPU. The profiler's own cost is in it, and
        is most of it where a graph is launched; `benchmarks.ch08_steps` measures the host without a profiler.
    step_ms: the median step just before the profile, which shows what the profiler adds to gpu_step_ms.
    """
    steps = len(found.marks) - 1
    kept = [found.step(i) for i in range(steps // 4, steps)]
    starts = [min(kernel.start for kernel in step.kernels) for step in kept if step.kernels]
    if len(starts) < 2:
        raise ValueError(f"kernels were found in {len(starts)} of {len(kept)} profiled steps: nothing lies between")
    window = starts[-1] - starts[0]
    inside = [kernel for kernel in found.kernels if starts[0] <= kernel.start < starts[-1]]
    gaps, periods = gaps_us(found.kernels, starts[0], starts[-1]), len(starts) - 1
    host = [step.marks[1] - step.marks[0] - sum(map(waited_us, step.calls)) for step in kept]
    return {
        "idle_share": sum(gaps) / window,
        "starved_share": sum(gap for gap in gaps if gap > BETWEEN_KERNELS_US) / window,
        "step_ms": found.step_ms,
        "gpu_step_ms": window / periods / 1000,
        "kernel_ms": (window - sum(gaps)) / periods / 1000,
        "kernels_per_step": len(inside) / periods,
        "host_ms": median(host) / 1000,
        "steps": periods,
    }


def timeline(found: Profile, i: int | None = None) -> dict[str, Any]:
    """One step for a figure: kernels and the host's calls in columns, microseconds from the step's start on the host.

    Args:
        i: which; the middle one by default.
    """
    step = found.step(len(found.marks) // 2 if i is None else i)
    zero = step.marks[0]

    def columns(spans: Sequence[Span]) -> dict[str, list[Any]]:
        return {
            "name": [span.name for span in spans],
            "start_us": [round(span.start - zero, 2) for span in spans],
            "us": [round(span.us, 2) for span in spans],
        }

    rows = {"kernels": columns(step.kernels), "calls": columns(step.calls)}
    return {"host_step_us": round(step.marks[1] - zero, 2), **rows}


def measure(llm: LLM, batch: int, prompt: int) -> dict[str, Any] | None:
    """The summary of a profile; None where there is none. A profiler that fails does not cost what was measured."""
    try:
        found = profile_decode(llm, batch, prompt)
        return None if found is None else {"batch": batch, "prompt_tokens": prompt} | summary(found)
    except (ValueError, KeyError, RuntimeError, OSError) as problem:
        print(f"no idle share: {type(problem).__name__}: {problem}")
        return None


def _short(name: str) -> str:
    """A kernel's name without return type, template arguments and parameters."""
    return re.split(r"[<(]", name.removeprefix("void "))[0][:80] or name[:80]
