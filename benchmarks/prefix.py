"""Requests that begin alike, with the prefix cache on and off: what is not computed twice, and what that saves.

As with a system prompt, one request with the same beginning has been answered before; then all others come at once.
Both engines answer the same requests in one run.

  minisgl bench prefix --model benchmarks/shapes/qwen3-0.6b --random-weights
  minisgl bench prefix --requests 8 --scale 0.1     # a small machine
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import replace
from random import Random
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import compare, idle
from benchmarks.measure import FIGURES, about, engine_config, engine_options, finish, medians, memory, options, serve
from benchmarks.offline import beside_limit, limit, print_figures, speeds
from minisgl.llm import LLM

CACHES = ("none", "radix")


def prompts(seed: int, requests: int, shared: int, own: int) -> list[list[int]]:
    """Random token ids, of which the first `shared` are the same in all."""
    random = Random(f"prefix {seed}")
    beginning = [random.randint(0, 10_000) for _ in range(shared)]
    return [beginning + [random.randint(0, 10_000) for _ in range(own)] for _ in range(requests)]


def lengths(args: argparse.Namespace) -> tuple[int, int, int]:
    """Tokens that all prompts share, those of each alone, and those of an answer."""
    shared, own, output = (max(1, round(args.scale * n)) for n in (args.shared, args.own, args.output))
    return shared, own, output


def run(llm: LLM, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """One pass, behind the request that comes before."""
    shared, own, output = lengths(args)
    before, *asked = prompts(seed, 1 + args.requests, shared, own)
    serve(llm, [before], [1], args.temperature)
    return {"seed": seed} | serve(llm, asked, [output] * args.requests, args.temperature)


def parser() -> argparse.ArgumentParser:
    parser = options("prefix", __doc__, "prefix")
    parser.add_argument("--requests", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--shared", type=int, default=1024, help="tokens that all begin with (default: %(default)s)")
    parser.add_argument("--own", type=int, default=64, help="tokens of each alone (default: %(default)s)")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies all lengths (default: %(default)s)")
    engine_options(parser)
    return parser


def main() -> None:
    args = (options := parser()).parse_args()
    if args.prefix_cache:
        options.error("both prefix caches are measured: leave --prefix-cache out")
    old = compare.read(args.compare) if args.compare else None
    shared, own, output = lengths(args)
    found: dict[str, dict[str, Any]] = {}
    head: dict[str, Any] = {}
    for cache in (bar := tqdm(CACHES, unit="engine")):
        bar.set_description(f"prefix cache {cache}")
        with LLM(engine_config(args, prefix_cache=cache)) as llm:
            run(llm, 10**6, args)
            passes = [run(llm, seed, args) for seed in args.seed]
            found[cache] = {"passes": passes, "memory": memory(llm), "idle": None}
            if not args.no_idle:
                batch = min(args.requests, llm.config.max_running_requests)
                found[cache]["idle"] = idle.measure(llm, batch, shared + own)
        head, config, dtype, device = about(llm, args), llm.model.config, llm.model.dtype, llm.device
        del llm  # the next one's pool takes what memory there is
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
    speed = speeds(device, dtype)
    whole = limit(config, dtype, [shared + own] * args.requests, [output] * args.requests, *speed.values())
    once = limit(config, dtype, [shared], [1], *speed.values()).prefill_flops
    saved = args.requests * once
    flops = whole.prefill_flops - saved
    reused = replace(whole, prefill_flops=flops, seconds=whole.seconds - saved / speed["matmul_flops_per_s"])
    for cache, least in zip(CACHES, (whole, reused), strict=True):
        engine = found[cache]
        engine["passes"] = [beside_limit(done, least) for done in engine["passes"]]
        engine |= medians(engine["passes"], *FIGURES) | {"work": engine["passes"][0]["work"]}
        print(
            f"prefix cache {cache}: {engine['tokens_per_s']:,.1f} tokens/s, {engine['fraction_of_limit']:.1%} of its "
            f"limit here; {engine['work']['tokens_reused']:,} tokens reused"
        )
        print_figures(engine)
    off, on = (found[cache] for cache in CACHES)
    data = head | {
        "requests": args.requests,
        "shared_tokens": shared,
        "own_tokens": own,
        "output_tokens": output,
        "machine": speed,
        "prefix_cache": found,
        "times_sooner": off["first_token_ms"]["p50"] / on["first_token_ms"]["p50"],
        "times_faster": on["tokens_per_s"] / off["tokens_per_s"],
    }
    print(f"{data['times_faster']:.2f} times the tokens/s, the first token {data['times_sooner']:.2f} times as soon")
    finish(args, data, device.type, old)


if __name__ == "__main__":
    main()
