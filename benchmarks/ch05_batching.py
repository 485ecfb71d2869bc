"""What a schedule is worth: the same requests under static, continuous, chunked and mixed batching.

By a clock that runs by rule (see ch05_clock), exact and the same everywhere:
- by_hand: four requests, step by step.
- modes: many requests at once, by mode.
- chunks: throughput against gaps between tokens, by the budget of a step.
- reserve: setting pages aside against preempting, in a small pool.
- queue: time to first token by arrival rate, and the rate at which the queue must explode.

Measured, on the course's default model:
- real: some requests by mode, and mixed by budget; a line fitted to the time of a step.
- profile: where the time of a decode step of eight requests goes.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import mean, median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from minisgl_kernels import reference
from torch.profiler import ProfilerActivity, profile, record_function
from tqdm import tqdm

from benchmarks.ch05_clock import MODES, Cost, Job, Run, by_hand, mixture, most_per_s, rows, simulate, switches
from benchmarks.record import save
from benchmarks.timing import synchronize, timed
from minisgl.attention.torch_backend import TorchAttention
from minisgl.config import EngineConfig
from minisgl.core import Batch, Request, SamplingParams
from minisgl.engine.engine import Engine
from minisgl.engine.runner import Flight
from minisgl.layers.embedding import Embedding
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import Rotary
from minisgl.llm import LLM

COST = Cost()
BUDGET, ROWS = 256, 96  # of the simulated engine
BUDGETS = [16, 32, 64, 96, 128, 256, 512, 1024, 2048]
RATES = [2, 6, 10, 13, 15, 17, 18, 19, 20, 21, 22, 24, 28]
REAL_JOBS = [
    Job(0, 48, 40),
    Job(0, 96, 24),
    Job(400, 320, 24),
    Job(800, 32, 32),
    Job(1200, 384, 16),
    Job(1600, 64, 32),
    Job(2000, 256, 24),
    Job(2400, 40, 24),
]
REAL_BUDGET, REAL_BUDGETS = 128, [32, 64, 128, 512]
PASSAGE = """The harbour master keeps a list of ships. Each line has a name, a port, a load and an hour. Some ships wait
outside for a berth, some are being emptied by two cranes, some are ready to leave with the tide. """


def simulated() -> dict[str, Any]:
    """Everything that needs no model."""
    hand = {mode: simulate(by_hand(), switches(mode, max_batch_tokens=100, max_running_requests=4)) for mode in MODES}
    many = mixture(96, seed=0)
    engine = {"max_batch_tokens": BUDGET, "max_running_requests": 32}
    data = {
        "cost": {"step_ms": COST.step_ms, "token_ms": COST.token_ms},
        "by_hand": {"budget": 100, "jobs": [vars(job) for job in by_hand()]}
        | {mode: run.summary | {"token_ms": run.token_ms} for mode, run in hand.items()},
        "modes": {
            "requests": len(many),
            **engine,
            **{mode: simulate(many, switches(mode, **engine)).summary for mode in MODES},
        },
        "chunks": [
            {"budget": budget} | simulate(many, switches("mixed", **engine | {"max_batch_tokens": budget})).summary
            for budget in tqdm(BUDGETS, desc="chunks")
        ],
        "reserve": {"pages": 512, "curve": [reserve(many, share) for share in (0.0, 0.1, 0.3, 0.6, 1.0)]},
        "queue": queue(),
    }
    return data


def reserve(jobs: Sequence[Job], share: float) -> dict[str, Any]:
    """A pool that holds a quarter of what all need together, with this share of each answer set aside."""
    config = switches("mixed", max_batch_tokens=BUDGET, max_running_requests=96, output_reserve=share)
    run = simulate(jobs, config, COST, pages=512)
    side_by_side = mean(len(step) for _, _, step in run.steps)
    return {"share": share, "rows": side_by_side} | run.summary


def queue(count: int = 400) -> dict[str, Any]:
    """Time to first token as arrivals come faster, and what theory says of the fastest."""
    drawn = mixture(count, seed=1, per_s=1.0)
    prompt, output = mean(job.prompt for job in drawn), mean(job.output for job in drawn)
    limits = {mode: most_per_s(mode, COST, BUDGET, ROWS, prompt, output) for mode in ("continuous", "mixed")}
    curve = []
    for per_s in tqdm(RATES, desc="queue"):
        point: dict[str, Any] = {"per_s": per_s}
        for mode in ("static", "continuous", "mixed"):
            config = switches(mode, max_batch_tokens=BUDGET, max_running_requests=ROWS)
            summary = simulate(mixture(count, seed=1, per_s=per_s), config, COST).summary
            point[mode] = {key: summary[key] for key in ("mean_first_token_ms", "worst_gap_ms", "tokens_per_s")}
        curve.append(point)
    return {
        "requests": count,
        "budget": BUDGET,
        "rows": ROWS,
        "mean_prompt": prompt,
        "mean_output": output,
        "most_per_s": limits,
        "curve": curve,
    }


def new_engine(llm: LLM, config: EngineConfig) -> Engine:
    """An engine on weights that are loaded already, with a pool of fixed size."""
    return Engine(llm.model, config)


def measured(llm: LLM, text: Sequence[int], jobs: Sequence[Job], config: EngineConfig) -> tuple[Run, list[list[int]]]:
    """Run jobs as they come, by this machine's clock; returns the run and the answers."""
    engine = new_engine(llm, config)
    requests = [
        Request(i, list(text[7 * i : 7 * i + job.prompt]), SamplingParams(max_tokens=job.output))
        for i, job in enumerate(jobs)
    ]  # no stop ids: each answer has its full length
    run, coming = Run(jobs), list(requests)
    planned: list[list[tuple[int, int, int]]] = []
    launch = engine.launch

    def observed(batch: Batch) -> Flight:
        planned.append(rows(batch))
        return launch(batch)

    engine.launch = observed  # type: ignore[method-assign]
    start = time.perf_counter()

    def now() -> float:
        return 1000 * (time.perf_counter() - start)

    while coming or engine.has_work:
        while coming and jobs[coming[0].id].arrival_ms <= now():
            engine.add(coming.pop(0))
        if not engine.has_work:
            time.sleep(0.001)
            continue
        begin, known = now(), {r.id: len(r.output) for r in requests}
        for request in engine.step():
            if len(request.output) > known[request.id]:
                run.token_ms.setdefault(request.id, []).append(now())
        run.steps.append((begin, now(), planned[-1]))
    run.tokens_computed, run.preemptions = engine.work.tokens_computed, engine.work.preemptions
    engine.close()
    return run, [request.output for request in requests]


def real(llm: LLM, rounds: int, shorter: int) -> dict[str, Any]:
    """REAL_JOBS by mode and by budget, the runs taking turns; medians over the rounds."""
    jobs = [Job(job.arrival_ms, job.prompt // shorter, job.output // shorter) for job in REAL_JOBS]
    text = llm.encode(PASSAGE * 12)
    common = {"max_running_requests": 8, "kv_pages": 200}
    configs = {mode: switches(mode, max_batch_tokens=REAL_BUDGET, **common) for mode in MODES}
    configs |= {f"mixed_{b}": switches("mixed", max_batch_tokens=b, **common) for b in REAL_BUDGETS if b != REAL_BUDGET}
    runs: dict[str, list[Run]] = defaultdict(list)
    answers = []
    measured(llm, text, jobs, configs["mixed"])  # warms up
    for _ in range(rounds):
        for name, config in tqdm(configs.items(), desc="real"):
            run, answer = measured(llm, text, jobs, config)
            runs[name].append(run)
            answers.append(answer)
    medians = {
        name: {key: median(run.summary[key] for run in own) for key in own[0].summary} for name, own in runs.items()
    }
    steps = [
        (sum(n for *_, n in step), end - begin)
        for own in runs.values()
        for run in own
        for begin, end, step in run.steps
    ]
    tokens, ms = np.array(steps).T
    token_ms, step_ms = np.polyfit(tokens, ms, 1)
    return {
        "jobs": [vars(job) for job in jobs],
        "budget": REAL_BUDGET,
        "rounds": rounds,
        "same_tokens": all(answer == answers[0] for answer in answers),
        "modes": {mode: medians[mode] for mode in MODES},
        "chunks": [{"budget": b} | medians["mixed" if b == REAL_BUDGET else f"mixed_{b}"] for b in REAL_BUDGETS],
        "fit": {"step_ms": float(step_ms), "token_ms": float(token_ms)},
    }


@contextmanager
def labelled(engine: Engine, device: torch.device) -> Iterator[None]:
    """Have the profiler see the parts of a step by name. The outermost label counts."""
    inside = False

    def named(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:
                return function(*args, **kwargs)
            inside = True
            try:
                with record_function(f"part: {label}"):
                    out = function(*args, **kwargs)
                    synchronize(device)
                    return out
            finally:
                inside = False

        return call

    runner = engine.runner
    assert runner
    parts = [
        (reference, "linear", "linear layers"),
        (Embedding, "logits", "linear layers"),
        (TorchAttention, "__init__", "attention"),
        (TorchAttention, "forward", "attention"),
        (RMSNorm, "forward", "norms"),
        (RMSNorm, "add", "norms"),
        (Rotary, "__call__", "rotation"),
        (reference, "apply_rope", "rotation"),
        (reference, "silu_and_mul", "activation"),
        (runner, "_choose", "sampling"),
        (engine.scheduler, "plan", "host"),
        (engine.scheduler, "retire", "host"),
        (runner.rows, "update", "host"),
        (runner.rows, "decode", "host"),
        (runner.rows, "lay_out", "host"),
        (runner, "_fetch", "host"),
    ]
    with ExitStack() as stack:
        for owner, name, label in parts:
            stack.enter_context(patch.object(owner, name, named(label, getattr(owner, name))))
        yield


def profiled(llm: LLM, batch: int, length: int, repeats: int = 8) -> dict[str, Any]:
    """Where a decode step of `batch` sequences goes, by share; and how long it takes when nobody looks."""
    config = switches("mixed", max_running_requests=batch, kv_pages=batch * (length + 64) // 16 + 2)
    engine, device = new_engine(llm, config), llm.device
    text = llm.encode(PASSAGE * 40)
    for i in range(batch):
        params = SamplingParams(max_tokens=3 * repeats + 8)
        engine.add(Request(i, list(text[11 * i : 11 * i + length]), params))
    while not all(len(r.output) for r in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    step_ms = 1000 * median(timed(engine.step, device) for _ in range(repeats))
    with labelled(engine, device), profile(activities=[ProfilerActivity.CPU]) as record:
        for _ in range(repeats):
            with record_function("part: step"):
                engine.step()
    us: Counter[str] = Counter()
    for event in record.key_averages():
        if event.key.startswith("part: "):
            us[event.key.removeprefix("part: ")] += event.cpu_time_total
    total = us.pop("step")
    operations = sum(
        event.name.startswith("aten::") and not (event.cpu_parent and event.cpu_parent.name.startswith("aten::"))
        for event in record.events()
    )
    engine.close()
    gc.collect()
    shares = {name: time / total for name, time in us.most_common()}
    return {
        "batch": batch,
        "length": length,
        "step_ms": step_ms,
        "shares": shares | {"the rest": 1 - sum(shares.values())},
        "operations": operations / repeats,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=2, help="of the measured runs (default: %(default)s)")
    parser.add_argument("--shorter", type=int, default=1, help="divide the measured requests' lengths by this")
    parser.add_argument("--name", default="ch05_batching", help="of the result file (default: %(default)s)")
    args = parser.parse_args()

    data = simulated()
    llm = LLM(EngineConfig.chapter(5, model=args.model, device=args.device, dtype=args.dtype, kv_pages=2))
    data |= {
        "model": args.model,
        "dtype": str(llm.model.dtype).removeprefix("torch."),
        "real": real(llm, args.rounds, args.shorter),
        "profile": [profiled(llm, batch, 256 // args.shorter) for batch in (1, 8)],
    }
    print(save(args.name, data, llm.device.type))


if __name__ == "__main__":
    main()
