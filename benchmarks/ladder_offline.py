"""What each chapter's engine adds on a GPU: the workload of `minisgl bench offline`, one engine a fresh process.

The kernels of an engine are compiled when they are first launched, and which those are depends on the number of
sequences. So the short warm-up answers as many requests as are measured, others and a tenth as long: their number
falls from all to one too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import ladder, offline
from benchmarks.gpu import table
from benchmarks.record import RESULTS, save
from minisgl.config import EngineConfig
from minisgl.models.config import ModelConfig

MODEL = str(Path(__file__).parent / "shapes/qwen3-0.6b")
MARK = "result: "  # before the line that the parent reads
Engine = tuple[int, str | None]  # a chapter, and an attention other than the chapter's


def run(chapter: int, attention: str | None, args: Namespace) -> dict[str, Any]:
    """One engine over the workload, after a warm-up; called in a fresh process."""
    from minisgl.llm import LLM

    switches = {"model": args.model, "device": args.device, "dtype": args.dtype, "random_weights": True}
    switches |= {"attention": attention} if attention else {}
    with LLM(EngineConfig.chapter(chapter, **switches)) as llm:
        if args.warmup != "none":
            other = {"scale": args.scale / 10} if args.warmup == "short" else {}
            offline.run(llm, 10**6, Namespace(**vars(args) | other))
        done = offline.run(llm, args.seed, args)
        return {
            "chapter": chapter,
            "attention": type_name(llm.engine.attention.__module__),
            "kernels": type_name(llm.engine.ops.__name__),
            "dtype": str(llm.model.dtype).removeprefix("torch."),
            "device": llm.device.type,
            **done,
        }


def type_name(module: str) -> str:
    """What the switch calls a module: torch for minisgl.attention.torch_backend and minisgl_kernels.reference."""
    name = module.rpartition(".")[2].removesuffix("_backend")
    return {"reference": "torch", "cpu": "cpp"}.get(name, name)


def in_a_fresh_process(engine: Engine) -> dict[str, Any]:
    """Run this file's `run` with the same options."""
    command = [sys.executable, "-m", "benchmarks.ladder_offline", *sys.argv[1:], "--engine", json.dumps(engine)]
    places = [str(RESULTS.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        raise SystemExit(f"the engine of chapter {engine[0]} failed: its error stands above")
    return json.loads(lines[-1].removeprefix(MARK))


def summary(done: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """A row of the table.

    Args:
        done: what `run` returns.
        limit_s: the least time for this workload.
    """
    steps = done["work"]["steps"]
    return {name: done[name] for name in ("chapter", "attention", "kernels", "tokens_per_s", "seconds")} | {
        "title": ladder.TITLES[done["chapter"]],
        "fraction_of_limit": limit_s / done["seconds"],
        "steps": steps,
        "ms_per_step": 1000 * done["seconds"] / steps,
        "first_token_s": done["first_token_s"],
    }


def engines(chapters: Sequence[int], cuda: bool) -> list[Engine]:
    """What to run, in order: the chapters, and chapter 6 once more on the attention in CUDA C++."""
    return [(chapter, None) for chapter in chapters] + ([(6, "cuda")] if cuda else [])


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--chapters", type=int, nargs="+", default=[5, 6, 7], help="default: 5 6 7")
    options.add_argument("--cuda", action="store_true", help="chapter 6 once more, on the attention in CUDA C++")
    options.add_argument(
        "--model", default=MODEL, help="a folder, of which the config is all that is used (default: Qwen3-0.6B's)"
    )
    options.add_argument("--device", default="auto", help="default: %(default)s")
    options.add_argument("--dtype", default="auto", help="as of `minisgl generate` (default: %(default)s)")
    options.add_argument("--seed", type=int, default=0, help="of the workload (default: %(default)s)")
    options.add_argument("--requests", type=int, default=256, help="default: %(default)s")
    options.add_argument("--scale", type=float, default=1.0, help="multiplies all lengths (default: %(default)s)")
    options.add_argument("--max-output", type=int, default=0, help="cuts the answers; 0 does not (default: 0)")
    options.add_argument("--temperature", type=float, default=0.6, help="default: %(default)s")
    options.add_argument("--warmup", choices=("full", "short", "none"), default="short", help="default: %(default)s")
    options.add_argument("--name", default="ladder_offline", help="of the result file (default: %(default)s)")
    options.add_argument("--engine", help=argparse.SUPPRESS)
    return options


def main() -> None:
    args = parser().parse_args()
    if args.engine:
        chapter, attention = json.loads(args.engine)
        print(MARK + json.dumps(run(chapter, attention, args)))
        return

    results = []
    for engine in (bar := tqdm(engines(args.chapters, args.cuda), unit="engine")):
        bar.set_description(f"chapter {engine[0]}")
        results.append(in_a_fresh_process(engine))
    device, dtype = results[0]["device"], getattr(torch, results[0]["dtype"])
    machine = offline.speeds(torch.device(device), dtype)
    prompts, outputs = offline.workload(args.seed, args.requests, args.scale, args.max_output)
    lengths = list(map(len, prompts))
    least = offline.limit(ModelConfig.from_folder(Path(args.model)), dtype, lengths, outputs, *machine.values())
    rows = [summary(done, least.seconds) for done in results]
    table(rows, "chapter", "title", "attention", "kernels", "tokens_per_s", "fraction_of_limit", "ms_per_step")
    options = {name: value for name, value in vars(args).items() if name not in ("engine", "name", "chapters", "cuda")}
    data = options | {"model": Path(args.model).name, "dtype": results[0]["dtype"], "machine": machine}
    limit = {"seconds": least.seconds, "tokens_per_s": sum(outputs) / least.seconds}
    print(save(args.name, data | {"limit": limit, "chapters": rows}, device))


if __name__ == "__main__":
    main()
