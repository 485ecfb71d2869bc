"""Fused ops on a GPU: bytes a second beside a copy, and time beside torch, eager and compiled.

- ops: each op at a prompt's number of tokens and at a decode's; of sampling the floor is one read of the logits.
- fuser: a generated kernel of norm, product and activation.
- profile: kernels and GPU time of a decode step in the engines of chapters 5 to 7.

Bytes are each input and each output once. All three are timed in CUDA graphs, so the host's time, which an engine pays
for every launch, is in none but `profile`.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
from minisgl_kernels import reference
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu import arguments, checked, floor_us, graph_time, limits, measure, precompile, sets_for, table
from benchmarks.timing import timed
from minisgl.config import EngineConfig
from minisgl.core import Request, SamplingParams
from minisgl.llm import LLM

DTYPE, SIZE, EPS = torch.bfloat16, torch.bfloat16.itemsize, 1e-6
MOST_ERROR = 8e-3  # ‖difference‖ / ‖result‖: bf16 rounds by 2e-3 on average, up to three times on the way
MOST_OTHER_TOKENS = 0.02  # of the rows that are sampled: sums in another order choose differently where two are close
SHAPES = {
    "qwen3-0.6b": {"hidden": 1024, "width": 3072, "heads": 16, "kv_heads": 8, "head_dim": 128, "vocab": 151_936},
    "llama-2-7b": {"hidden": 4096, "width": 11_008, "heads": 32, "kv_heads": 32, "head_dim": 128, "vocab": 32_000},
}
TOKENS = (16_384, 256)
SAMPLING = ("sample", "sample_filtered", "greedy")  # temperature 0.6; with top-k 50 and top-p 0.9; temperature 0
PROFILED = {"batch": 256, "prompt": 256, "steps": 6}
MOST_ANSWER = 128  # tokens: nobody ends before the last step, though the first began 40 steps before the last


@dataclass(frozen=True)
class Case:
    """One op at one size; a row of the table."""

    op: str
    shape: str  # of SHAPES
    tokens: int

    @property
    def function(self) -> str:
        """The name in minisgl_kernels.triton and in reference."""
        return "sample" if self.op in SAMPLING else self.op

    @property
    def bytes(self) -> int:
        """Each input and output once."""
        return op_bytes(self.function, self.tokens, SHAPES[self.shape])


CASES = [
    *(Case(op, "qwen3-0.6b", tokens) for op in ("add_rms_norm", "silu_and_mul") for tokens in TOKENS),
    *(Case(op, "llama-2-7b", tokens) for op in ("add_rms_norm", "silu_and_mul") for tokens in TOKENS),
    *(Case(op, "qwen3-0.6b", tokens) for op in ("qk_norm_rope_store", "embedding", "rms_norm") for tokens in TOKENS),
    *(Case(op, "qwen3-0.6b", 256) for op in SAMPLING),
]
FUSER = {"inner": 1024, "columns": 3072}
FUSER_TOKENS = (16_384, 16)


def op_bytes(op: str, tokens: int, shape: Mapping[str, int]) -> int:
    """What an op must move for this many tokens, each input and output once, in 16 bits."""
    hidden, head_dim = shape["hidden"], shape["head_dim"]
    row = tokens * hidden
    qkv = tokens * (shape["heads"] + 2 * shape["kv_heads"]) * head_dim  # read once; written once, as q and in the pool
    return {
        "rms_norm": SIZE * (2 * row + hidden),
        "add_rms_norm": SIZE * (4 * row + hidden),  # x and the residual in, their sum and its norm out
        "silu_and_mul": SIZE * 3 * tokens * shape["width"],
        "qk_norm_rope_store": SIZE * (2 * qkv + tokens * head_dim + 2 * head_dim) + 8 * tokens,  # cos, sin, slots
        "embedding": SIZE * 2 * row + 8 * tokens,  # ids that all differ
        "sample": SIZE * tokens * shape["vocab"],
    }[op]


def fuser_flops(tokens: int) -> int:
    """Of its product."""
    return 2 * tokens * FUSER["inner"] * FUSER["columns"]


def op_inputs(case: Case, seed: int = 0, device: str = "cuda") -> tuple[Any, ...]:
    """Random arguments of an op."""
    generator = torch.Generator(device).manual_seed(seed)
    shape, tokens = SHAPES[case.shape], case.tokens

    def randn(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=DTYPE, device=device).normal_(generator=generator)

    hidden, head_dim, kv_heads = shape["hidden"], shape["head_dim"], shape["kv_heads"]
    if case.op == "rms_norm":
        return randn(tokens, hidden), randn(hidden), EPS
    if case.op == "add_rms_norm":
        return randn(tokens, hidden), randn(tokens, hidden), randn(hidden), EPS
    if case.op == "silu_and_mul":
        return (randn(tokens, 2 * shape["width"]),)
    if case.op == "embedding":
        ids = torch.randperm(shape["vocab"], generator=generator, device=device)[:tokens]
        return ids, embeddings(shape["vocab"], hidden, device)
    if case.op == "qk_norm_rope_store":
        slots = torch.randperm(tokens + 64, generator=generator, device=device)[:tokens]
        keys, values = (
            torch.full((tokens + 64, kv_heads, head_dim), torch.nan, dtype=DTYPE, device=device) for _ in range(2)
        )
        angles = torch.rand(tokens, head_dim // 2, generator=generator, device=device) * 6.28
        qkv = randn(tokens, shape["heads"] + 2 * kv_heads, head_dim)
        return (
            qkv, randn(head_dim), randn(head_dim), EPS, angles.cos().to(DTYPE), angles.sin().to(DTYPE),
            keys, values, slots,
        )  # fmt: skip
    seeds = torch.arange(tokens, device=device) + tokens * seed
    temperature = torch.full((tokens,), 0.0 if case.op == "greedy" else 0.6, device=device)
    rows = (4 * randn(tokens, shape["vocab"]), temperature, seeds, torch.full_like(seeds, 700))
    if case.op != "sample_filtered":
        return rows
    return (*rows, torch.full_like(seeds, 50), torch.full_like(temperature, 0.9), torch.zeros_like(temperature))


@cache
def embeddings(vocab: int, hidden: int, device: str) -> torch.Tensor:
    """One table for all sets of inputs, which differ in the rows that they read."""
    return torch.empty(vocab, hidden, dtype=DTYPE, device=device).normal_()


def outputs(op: str, function: Callable[..., Any], args: tuple[Any, ...]) -> list[torch.Tensor]:
    """All that an op writes: what it returns, and for qk_norm_rope_store what now is in the pool."""
    result = function(*args)
    if op == "qk_norm_rope_store":
        return [result, *(pool[args[-1]] for pool in args[-3:-1])]
    return list(result) if isinstance(result, tuple) else [result]


def in_fp64(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies of the arguments, floats in fp64 (the reference's norms take sums in fp32 all the same)."""
    return tuple(
        arg.double() if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg for arg in args
    )  # fmt: skip


def op_error(case: Case, function: Callable[..., Any]) -> float:
    """How far an op is from the reference: relative, or for sample the share of other tokens. ValueError if too far."""
    args = op_inputs(case)
    if case.function != "sample":
        expected = outputs(case.op, getattr(reference, case.function), in_fp64(args))
        return checked(lambda: outputs(case.op, function, args), expected, MOST_ERROR)
    other = (function(*args) != reference.sample(*args)).double().mean().item()
    if other > MOST_OTHER_TOKENS:
        raise ValueError(f"{other:.1%} of the sampled tokens are not the reference's: not worth timing")
    return other


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """By torch.compile, for one set of shapes."""
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)


def times(
    ours: Callable[..., Any], composed: Callable[..., Any], sets: Sequence[tuple[Any, ...]]
) -> dict[str, float | str | None]:
    """Microseconds of our kernel, of torch eager and of torch.compile over the same sets of inputs."""

    def time(function: Callable[..., Any]) -> dict[str, float]:
        return graph_time([lambda args=args: function(*args) for args in sets])

    found: dict[str, Any] = {**time(ours), "eager_us": time(composed)["us"], "compile_us": None}
    try:
        found["compile_us"] = time(compiled(composed))["us"]
    except Exception as problem:  # whatever the compiler raises
        found["compile_failed"] = f"{type(problem).__name__}: {problem}".splitlines()[0][:200]
    return found


@torch.inference_mode()
def ops(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Each case's time, with its share of the floor."""
    from minisgl_kernels import triton

    rows = []
    for case in CASES:
        ours = getattr(triton, case.function)
        error = op_error(case, ours)
        sets = [op_inputs(case, seed) for seed in range(sets_for(case.bytes))]
        least = floor_us(data["limits"], case.bytes)
        row = {"op": case.op, "shape": case.shape, "tokens": case.tokens, "bytes": case.bytes, "floor_us": least}
        row |= {"error": error} | times(ours, getattr(reference, case.function), sets)
        rows.append(row | {"fraction": least / row["us"], "times_the_floor": row["us"] / least})
        del sets
        torch.cuda.empty_cache()
    table(rows, "op", "shape", "tokens", "floor_us", "us", "fraction", "eager_us", "compile_us", "error")
    return rows


def fused_op() -> Any:
    """The worked example of the generator."""
    from minisgl_kernels.fuser import activation, fuse, matmul, norm

    return fuse(norm(EPS), matmul(), activation("silu"))


def fuser_inputs(tokens: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """x, the norm's weight and the product's."""
    generator = torch.Generator("cuda").manual_seed(seed)
    sizes = ((tokens, FUSER["inner"]), (FUSER["inner"],), (FUSER["columns"], FUSER["inner"]))
    x, weight, product = (torch.empty(s, dtype=DTYPE, device="cuda").normal_(generator=generator) for s in sizes)
    return x, weight, product * FUSER["inner"] ** -0.5


@torch.inference_mode()
def fuser(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Norm, product and activation in one kernel."""
    op, rows = fused_op(), []
    for tokens in FUSER_TOKENS:
        args = fuser_inputs(tokens)
        op(*args)  # its own check
        error = checked(lambda args=args: op(*args), [op.reference(*in_fp64(args))], MOST_ERROR)
        traffic = op.bytes({"rows": tokens, **FUSER}, DTYPE)
        least = floor_us(data["limits"], traffic.fused_bytes, fuser_flops(tokens))
        row = {"tokens": tokens, **FUSER, "steps": op.name, "flops": fuser_flops(tokens), "floor_us": least}
        row |= {"fused_bytes": traffic.fused_bytes, "composed_bytes": traffic.composed_bytes}
        sets = [fuser_inputs(tokens, seed) for seed in range(sets_for(traffic.fused_bytes))]
        row |= {"saved_bytes": traffic.saved_bytes, "error": error, **times(op, op.reference, sets)}
        rows.append(row | {"fraction": least / row["us"]})
    table(rows, "tokens", "floor_us", "us", "fraction", "eager_us", "compile_us", "saved_bytes", "error")
    return rows


def profiles(data: dict[str, Any]) -> list[dict[str, Any]]:
    """A decode step of the engines of three chapters."""
    rows = []
    for chapter in (5, 6, 7):
        rows.append(profile_chapter(chapter))
        gc.collect()
        torch.cuda.empty_cache()
    table(rows, "chapter", "attention", "kernels", "kernels_per_step", "gpu_ms", "step_ms", "idle")
    return rows


def profile_chapter(chapter: int) -> dict[str, Any]:
    """Random weights, 256 sequences that decode together: the step's time, and the GPU's part of it."""
    batch, prompt, steps = PROFILED["batch"], PROFILED["prompt"], PROFILED["steps"]
    model = str(Path(__file__).parent / "shapes/qwen3-0.6b")
    pages = batch * ((prompt + MOST_ANSWER) // 16 + 1) + 1
    config = EngineConfig.chapter(chapter, model=model, device="cuda", random_weights=True, kv_pages=pages)
    random = Random(0)
    with LLM(config) as llm:
        engine = llm.engine
        for i in range(batch):
            params = SamplingParams(max_tokens=MOST_ANSWER, temperature=0.6, ignore_eos=True, seed=i)
            engine.add(Request(i, [random.randrange(10_000) for _ in range(prompt)], params, seed=i))
        while engine.scheduler.waiting or not all(request.output for request in engine.scheduler.running):
            engine.step()
        for _ in range(3):
            engine.step()
        step_ms = 1000 * median(timed(engine.step, llm.device) for _ in range(steps))
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
            for _ in range(steps):
                engine.step()
            torch.cuda.synchronize()
        kernels, gpu_ms = gpu_work(record)
        row = {"attention": engine.attention.__name__, "kernels": engine.ops.__name__.rpartition(".")[2]}
    per_step = gpu_ms / steps
    row |= {"kernels_per_step": kernels / steps, "gpu_ms": per_step, "step_ms": step_ms, "idle": 1 - per_step / step_ms}
    return {"chapter": chapter, **PROFILED, **row}


def gpu_work(record: Any) -> tuple[int, float]:
    """Kernels that a profile saw, and the GPU's milliseconds in them and in copies."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        record.export_chrome_trace(str(path))
        return count_kernels(json.loads(path.read_text())["traceEvents"])


def count_kernels(events: Sequence[dict[str, Any]]) -> tuple[int, float]:
    """The same, of the events of a Chrome trace.

    Raises:
        ValueError: there is no kernel among them.
    """
    kernels = [event["dur"] for event in events if event.get("cat") == "kernel"]
    if not kernels:
        raise ValueError("the profiler saw no kernel: this process may not use the GPU's counters (CUPTI)")
    copies = [event["dur"] for event in events if event.get("cat") in ("gpu_memcpy", "gpu_memset")]
    return len(kernels), (sum(kernels) + sum(copies)) / 1000


@torch.inference_mode()
def compile_op(case: Case) -> None:
    """Compile our kernel and torch's for one case, at its full size: both depend on it."""
    from minisgl_kernels import triton

    args = op_inputs(case)
    getattr(triton, case.function)(*args)
    compiled(getattr(reference, case.function))(*args)
    torch.cuda.synchronize()


@torch.inference_mode()
def compile_fuser(tokens: int) -> None:
    """The same for the generated kernel."""
    op, args = fused_op(), fuser_inputs(tokens)
    op(*args)
    compiled(op.reference)(*args)
    torch.cuda.synchronize()


PARTS = {"limits": lambda data: limits(), "ops": ops, "fuser": fuser, "profile": profiles}


def main() -> int:
    args = arguments(__doc__, "ch07_fused", list(PARTS))
    if not args.no_precompile:
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # of each process, and there are several
        calls = [(compile_op, case) for case in reversed(CASES)]  # the longest to compile first
        precompile([*calls, *((compile_fuser, tokens) for tokens in FUSER_TOKENS)])
    only = dict.fromkeys(itertools.chain(["limits"], args.only))
    return measure(args.name, {part: PARTS[part] for part in only}, {"shapes": SHAPES})


if __name__ == "__main__":
    raise SystemExit(main())
