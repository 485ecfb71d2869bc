"""A few requests started together: how long a token takes when nobody else is there.

Each batch is that many requests of 512 random tokens, answered with 512 more. Batch 1 is what one user sees.

  minisgl bench latency --model benchmarks/shapes/qwen3-0.6b --random-weights --seed 0 1 2
  minisgl bench latency --batch 1 4 --scale 0.1     # a small machine
"""

from __future__ import annotations

import argparse
from random import Random
from time import perf_counter
from typing import Any

from tqdm import tqdm

from benchmarks import compare, idle
from benchmarks.measure import FIGURES, about, engine_config, engine_options, finish, medians, memory, options, serve
from benchmarks.offline import beside_limit, limit, print_figures, speeds
from minisgl.llm import LLM


def prompts(seed: int, batch: int, length: int) -> list[list[int]]:
    """Random token ids; another seed or another batch shares no beginning with them."""
    random = Random(f"latency {seed} {batch}")
    return [[random.randint(0, 10_000) for _ in range(length)] for _ in range(batch)]


def lengths(args: argparse.Namespace) -> tuple[int, int]:
    """Tokens of a prompt and of an answer."""
    return max(1, round(args.scale * args.prompt)), max(1, round(args.scale * args.output))


def run(llm: LLM, seed: int, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """One pass."""
    prompt, output = lengths(args)
    return {"seed": seed} | serve(llm, prompts(seed, batch, prompt), [output] * batch, args.temperature)


def parser() -> argparse.ArgumentParser:
    parser = options("latency", __doc__, "latency")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16], help="default: %(default)s")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--output", type=int, default=512, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies both (default: %(default)s)")
    engine_options(parser)
    return parser


def main() -> None:
    args = parser().parse_args()
    old = compare.read(args.compare) if args.compare else None
    prompt, output = lengths(args)
    batches: dict[int, dict[str, Any]] = {}
    start = perf_counter()
    with LLM(engine_config(args)) as llm:
        start_s = perf_counter() - start
        for batch in (bar := tqdm(args.batch, unit="batch")):
            bar.set_description(f"batch {batch}")
            run(llm, 10**6, batch, args)  # a full warm-up
            passes = [run(llm, seed, batch, args) for seed in args.seed]
            batches[batch] = {"batch": batch, "passes": passes, "memory": memory(llm)}
        for batch in () if args.no_idle else args.batch:  # after all passes: the profiler may leave something behind
            batches[batch]["idle"] = idle.measure(llm, batch, prompt)
        work = llm.stats()
    speed = speeds(llm.device, llm.model.dtype)
    for batch, found in batches.items():
        least = limit(llm.model.config, llm.model.dtype, [prompt] * batch, [output] * batch, *speed.values())
        found["passes"] = [beside_limit(done, least) for done in found["passes"]]
        found |= medians(found["passes"], *FIGURES) | {"work": found["passes"][0]["work"]}
        found["limit"] = found["passes"][0]["limit"]
        found.setdefault("idle", None)
        print(
            f"batch {batch}: {found['tokens_per_s']:,.1f} tokens/s, {found['fraction_of_limit']:.1%} of the limit here "
            f"({found['limit']['tokens_per_s']:,.1f})"
        )
        print_figures(found)
    data = about(llm, args) | {
        "prompt_tokens": prompt,
        "output_tokens": output,
        "machine": speed,
        "start_s": start_s,
        "stats": work,
        "batches": {str(batch): found for batch, found in batches.items()},
    }
    finish(args, data, llm.device.type, old)


if __name__ == "__main__":
    main()
