"""Many requests, all there from the start: tokens per second, beside what this machine's memory allows.

The workload is the one that mini-sglang and nano-vllm publish: 256 requests of 100 to 1,024 tokens, and as many more to
answer.
Prompts are token ids and weights may be random, so that a model's config is all it needs:

  minisgl bench offline --model benchmarks/shapes/qwen3-0.6b --random-weights --seed 0 1 2
  minisgl bench offline --requests 16 --scale 0.1     # a small machine
  minisgl bench offline --json new.json --compare old.json
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import compare, floor, gpu, idle
from benchmarks.ch01_length import machine
from benchmarks.measure import FIGURES, about, engine_config, engine_options, finish, medians, memory, options, serve
from minisgl.kvcache.contiguous import kv_bytes_per_token
from minisgl.llm import LLM
from minisgl.models.config import ModelConfig


@dataclass(frozen=True)
class Limit:
    """The least work that a workload is: bytes to read, operations to do, and the time for both."""

    weight_bytes: int
    kv_bytes: int
    prefill_flops: int
    seconds: float


def workload(
    seed: int, requests: int = 256, scale: float = 1.0, max_output: int = 0
) -> tuple[list[list[int]], list[int]]:
    """Prompts, and how many tokens to answer each with.

    Args:
        scale: multiplies all lengths, for small machines.
        max_output: cuts the answers; 0 does not.
    """
    r = random.Random(seed)
    prompts = [[r.randint(0, 10000) for _ in range(r.randint(100, 1024))] for _ in range(requests)]
    outputs = [r.randint(100, 1024) for _ in range(requests)]
    prompts = [prompt[: max(1, round(scale * len(prompt)))] for prompt in prompts]
    outputs = [max(1, round(scale * n)) for n in outputs]
    return prompts, [min(n, max_output or n) for n in outputs]


def limit(
    config: ModelConfig,
    dtype: torch.dtype,
    prompts: Sequence[int],
    outputs: Sequence[int],
    bytes_per_s: float,
    flops_per_s: float,
) -> Limit:
    """What no engine can beat that keeps weights and KV as they are and shares no prefix.

    If all requests run together, there are as many steps as the longest answer has tokens, and each reads every weight
    once; of an embedding that is not the head too, a few rows only. The prefill gives a request's first token; each
    later one reads the K and V of all tokens up to it. The prefill's arithmetic does not overlap with that: two
    operations a weight and token, and causal attention. The head runs once a token of the answer, in steps that are
    limited by memory.

    Args:
        prompts, outputs: numbers of tokens.
        bytes_per_s: of a copy, reads and writes counted.
        flops_per_s: of a large matrix product.
    """
    weight_bytes = floor.weights_read(config) * dtype.itemsize * max(outputs)
    per_token = kv_bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, dtype)
    kv_bytes = per_token * sum(sum(range(p + 1, p + n)) for p, n in zip(prompts, outputs, strict=True))
    flops = sum(floor.prefill_flops(config, p) for p in prompts)
    return Limit(weight_bytes, kv_bytes, flops, (weight_bytes + kv_bytes) / bytes_per_s + flops / flops_per_s)


def run(llm: LLM, seed: int, args: argparse.Namespace, first: int | None = None) -> dict[str, Any]:
    """One pass over the workload, or over the first few of its requests, as `measure.serve` reports it."""
    prompts, outputs = workload(seed, args.requests, args.scale, args.max_output)
    return {"seed": seed} | serve(llm, prompts[:first], outputs[:first], args.temperature)


def speeds(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """What this machine reaches at its best; a CPU may multiply faster in fp32 than in the model's own dtype."""
    if device.type == "cuda":  # by events around the launches: a copy takes a millisecond, of which the host is no part
        found = gpu.limits()
        return {
            "copy_bytes_per_s": 1e12 * found["copy_tb_s"],
            "matmul_flops_per_s": 1e12 * found["matmul_tflop_s"],
        }
    measured = [machine(device, kind, repeats=5) for kind in {dtype, torch.float32 if device.type == "cpu" else dtype}]
    return {name: max(speed[name] for speed in measured) for name in measured[0]}


def beside_limit(done: dict[str, Any], least: Limit) -> dict[str, Any]:
    """A pass with the least time for its work and the fraction of that speed which it reached."""
    bound = asdict(least) | {"tokens_per_s": done["output_tokens"] / least.seconds}
    return done | {"limit": bound, "fraction_of_limit": least.seconds / done["seconds"]}


def parser() -> argparse.ArgumentParser:
    parser = options("offline", __doc__, "offline")
    parser.add_argument("--requests", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies all lengths (default: %(default)s)")
    parser.add_argument("--max-output", type=int, default=0, help="cuts the answers; 0 does not (default: %(default)s)")
    parser.add_argument("--warmup", choices=("full", "short", "none"), default="full", help="default: %(default)s")
    engine_options(parser)
    return parser


def main() -> None:
    args = parser().parse_args()
    old = compare.read(args.compare) if args.compare else None
    start = perf_counter()
    with LLM(engine_config(args)) as llm:
        start_s = perf_counter() - start
        if args.warmup != "none":  # other prompts than those measured, which would be found in the prefix cache
            short = {"requests": min(args.requests, 8), "max_output": 8} if args.warmup == "short" else {}
            run(llm, 10**6, argparse.Namespace(**vars(args) | short))
        passes = [run(llm, seed, args) for seed in tqdm(args.seed, desc="passes")]
        used = memory(llm)
        batch = min(args.requests, llm.config.max_running_requests)
        mean = max(1, round(562 * args.scale))  # tokens of a prompt, on average
        gpu_use = None if args.no_idle else idle.measure(llm, batch, mean)
        work = llm.stats()
    # the pool's memory has been given back: it is wanted for the copy
    config, dtype = llm.model.config, llm.model.dtype
    speed = speeds(llm.device, dtype)
    for i, done in enumerate(passes):
        prompts, outputs = workload(done["seed"], args.requests, args.scale, args.max_output)
        lengths = list(map(len, prompts))
        passes[i] = done = beside_limit(done, limit(config, dtype, lengths, outputs, *speed.values()))
        print(
            f"seed {done['seed']}: {done['tokens_per_s']:,.1f} tokens/s, {done['fraction_of_limit']:.1%} of the limit "
            f"here ({done['limit']['tokens_per_s']:,.1f}); {done['work']['steps']:,} steps, {done['seconds']:.2f} s"
        )
    data = about(llm, args) | {
        "requests": args.requests,
        "scale": args.scale,
        "max_output": args.max_output,
        "warmup": args.warmup,
        "machine": speed,
        "start_s": start_s,
        "memory": used,
        "idle": gpu_use,
        "stats": work,
        "passes": passes,
        "work": passes[0]["work"],
    }
    data |= medians(passes, *FIGURES)
    print_figures(data)
    finish(args, data, llm.device.type, old)


def print_figures(data: dict[str, Any]) -> None:
    """Latency, memory and the GPU's idle share, in two lines."""
    first, between, used = data["first_token_ms"], data["between_tokens_ms"], data["memory"]
    line = f"first token after {first['p50']:,.1f} ms (p99 {first['p99']:,.1f})"
    if between:
        line += ", then " + " · ".join(f"{name} {ms:,.2f}" for name, ms in between.items()) + " ms between tokens"
    print(line)
    names = {name: name.removesuffix("_bytes").replace("_", " ") for name, value in used.items() if value}
    line = " · ".join(f"{shown} {used[name] / 1e9:,.2f} GB" for name, shown in names.items())
    if data["idle"]:
        part = data["idle"]
        line += f"; profiled: the GPU is idle for {part['idle_share']:.1%} of a decode step"
        line += f" ({part['starved_share']:.1%} for want of work)"
    print(line)


if __name__ == "__main__":
    main()
