"""Many requests, all there from the start: tokens per second, beside what this machine's memory allows.

The workload is the one that mini-sglang and nano-vllm publish: 256 requests of 100 to 1,024 tokens, and as many more to
answer.
Prompts are token ids and weights may be random, so that a model's config is all it needs:

  minisgl bench offline --model benchmarks/shapes/qwen3-0.6b --random-weights
  minisgl bench offline --requests 16 --scale 0.1     # a small machine
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.ch01_length import machine, parameters
from benchmarks.record import save
from benchmarks.timing import timed
from minisgl.cli import add_fields, given_fields
from minisgl.config import EngineConfig
from minisgl.core import SamplingParams
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
    once. The prefill gives a request's first token; each later one reads the K and V of all tokens up to it. The
    prefill's arithmetic does not overlap with that: two operations a weight and token, and causal attention. The
    head runs once a token of the answer, in steps that are limited by memory.

    Args:
        prompts, outputs: numbers of tokens.
        bytes_per_s: of a copy, reads and writes counted.
        flops_per_s: of a large matrix product.
    """
    count = parameters(config)
    weight_bytes = count["total"] * dtype.itemsize * max(outputs)
    per_token = kv_bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, dtype)
    kv_bytes = per_token * sum(sum(range(p + 1, p + n)) for p, n in zip(prompts, outputs, strict=True))
    width = config.num_layers * config.num_heads * config.head_dim
    flops = 2 * (count["attention"] + count["mlp"]) * sum(prompts) + sum(2 * width * p * p for p in prompts)
    return Limit(weight_bytes, kv_bytes, flops, (weight_bytes + kv_bytes) / bytes_per_s + flops / flops_per_s)


def run(llm: LLM, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """One pass: seconds, tokens per second and work."""
    prompts, outputs = workload(seed, args.requests, args.scale, args.max_output)
    vocabulary = llm.model.config.vocab_size
    prompts = [[token % vocabulary for token in prompt] for prompt in prompts]
    params = [
        SamplingParams(max_tokens=n, temperature=args.temperature, ignore_eos=True, detokenize=False, seed=i)
        for i, n in enumerate(outputs)
    ]
    before = asdict(llm.work)
    done: list[Any] = []
    seconds = timed(lambda: done.extend(llm.generate(prompts, params)), llm.device)
    if errors := [completion.error for completion in done if completion.error]:
        raise ValueError(f"{len(errors)} of {len(done)} requests failed, the first with: {errors[0]}")
    tokens = sum(len(completion.token_ids) for completion in done)
    assert tokens == sum(outputs)
    return {
        "seed": seed,
        "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "first_token_s": median(completion.first_token_s for completion in done),
        "work": {name: count - before[name] for name, count in asdict(llm.work).items()},
    }


def speeds(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """What this machine reaches at its best; a CPU may multiply faster in fp32 than in the model's own dtype."""
    measured = [machine(device, kind, repeats=5) for kind in {dtype, torch.float32 if device.type == "cpu" else dtype}]
    return {name: max(speed[name] for speed in measured) for name in measured[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        "minisgl bench offline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="one pass each (default: %(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies all lengths (default: %(default)s)")
    parser.add_argument("--max-output", type=int, default=0, help="cuts the answers; 0 does not (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.6, help="default: %(default)s")
    parser.add_argument("--warmup", choices=("full", "short", "none"), default="full", help="default: %(default)s")
    parser.add_argument("--chapter", type=int, help="the engine as it stands at the end of this chapter")
    parser.add_argument("--name", default="offline", help="of the result file (default: %(default)s)")
    add_fields(parser.add_argument_group("engine"), EngineConfig)
    args = parser.parse_args()

    switches = given_fields(EngineConfig, args)
    llm = LLM(EngineConfig(**switches) if args.chapter is None else EngineConfig.chapter(args.chapter, **switches))
    if args.warmup != "none":  # other prompts than those measured, which would be found in the prefix cache
        short = {"requests": min(args.requests, 8), "max_output": 8} if args.warmup == "short" else {}
        run(llm, 10**6, argparse.Namespace(**vars(args) | short))
    passes = [run(llm, seed, args) for seed in tqdm(args.seed, desc="passes")]
    llm.close()  # the pool's memory is wanted for the copy

    config, dtype = llm.model.config, llm.model.dtype
    speed = speeds(llm.device, dtype)
    for done in passes:
        prompts, outputs = workload(done["seed"], args.requests, args.scale, args.max_output)
        least = limit(config, dtype, list(map(len, prompts)), outputs, *speed.values())
        done["limit"] = asdict(least) | {"tokens_per_s": done["output_tokens"] / least.seconds}
        done["fraction_of_limit"] = least.seconds / done["seconds"]
        print(
            f"seed {done['seed']}: {done['tokens_per_s']:,.1f} tokens/s, {done['fraction_of_limit']:.1%} of the limit "
            f"here ({done['limit']['tokens_per_s']:,.1f}); {done['work']['steps']:,} steps, {done['seconds']:.2f} s"
        )
    data = {
        "model": llm.config.model,
        "dtype": str(dtype).removeprefix("torch."),
        "chapter": args.chapter,
        "switches": switches,
        "requests": args.requests,
        "scale": args.scale,
        "max_output": args.max_output,
        "warmup": args.warmup,
        "machine": speed,
        "passes": passes,
        "tokens_per_s": median(done["tokens_per_s"] for done in passes),
        "fraction_of_limit": median(done["fraction_of_limit"] for done in passes),
    }
    print(save(args.name, data, llm.device.type))


if __name__ == "__main__":
    main()
