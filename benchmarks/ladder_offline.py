"""What each chapter's engine adds on a GPU: the workload of `minisgl bench offline`, one engine a fresh process.

The kernels of an engine are compiled when they are first launched, and which those are depends on the number of
sequences. So the short warm-up answers as many requests as are measured, others and a tenth as long: their number
falls from all to one too.
"""

from __future__ import annotations

import argparse
import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import compare, fresh, ladder, offline
from benchmarks.gpu import table
from benchmarks.measure import finish, memory, result_options
from benchmarks.record import RESULTS
from minisgl.config import EngineConfig
from minisgl.models.config import ModelConfig

MODEL = str(Path(__file__).parent / "shapes/qwen3-0.6b")
FEW = {1: 1, 2: 2, 3: 16, 4: 16}  # chapters that get the first few requests
NO_SETTINGS = ladder.NO_SETTINGS | {"engine", "cuda", "add", "offline"}
Engine = tuple[int, str | None]  # a chapter, and an attention other than the chapter's


def run(chapter: int, attention: str | None, args: Namespace) -> dict[str, Any]:
    """One engine over the workload, after a warm-up; called in a fresh process."""
    from minisgl.llm import LLM

    switches = {"model": args.model, "device": args.device, "dtype": args.dtype, "random_weights": True}
    switches |= {"attention": attention} if attention else {}
    with LLM(EngineConfig.chapter(chapter, **switches)) as llm:
        if args.warmup != "none":
            other = {"scale": args.scale / 10} if args.warmup == "short" else {}
            offline.run(llm, 10**6, Namespace(**vars(args) | other), FEW.get(chapter))
        done = offline.run(llm, args.seed, args, FEW.get(chapter))
        return {
            "chapter": chapter,
            "attention": type_name(llm.engine.attention.__module__),
            "kernels": type_name(llm.engine.ops.__name__),
            "dtype": str(llm.model.dtype).removeprefix("torch."),
            "device": llm.device.type,
            "requests": min(FEW.get(chapter, args.requests), args.requests),
            "memory": memory(llm),
            **done,
        }


def type_name(module: str) -> str:
    """What the switch calls a module: torch for minisgl.attention.torch_backend and minisgl_kernels.reference."""
    name = module.rpartition(".")[2].removesuffix("_backend")
    return {"reference": "torch", "cpu": "cpp"}.get(name, name)


COPIED = ("chapter", "attention", "kernels", "requests", "tokens_per_s", "seconds", "first_token_ms")
COPIED += ("between_tokens_ms", "memory")


def summary(done: Mapping[str, Any], limit_tokens_per_s: float) -> dict[str, Any]:
    """A row of the table.

    Args:
        done: what `run` returns.
        limit_tokens_per_s: of the whole workload, also for an engine that got a few of its requests.
    """
    steps = done["work"]["steps"]
    return {name: done[name] for name in COPIED} | {
        "title": ladder.TITLES.get(done["chapter"], f"chapter {done['chapter']}"),
        "fraction_of_limit": done["tokens_per_s"] / limit_tokens_per_s,
        "steps": steps,
        "ms_per_step": 1000 * done["seconds"] / steps,
        "first_token_s": done["first_token_s"],
    }


def engines(chapters: Sequence[int], cuda: bool) -> list[Engine]:
    """What to run, in order: the chapters, and chapter 6 once more on the attention in CUDA C++."""
    return [(chapter, None) for chapter in chapters] + ([(6, "cuda")] if cuda else [])


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        "minisgl bench ladder --offline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)  # how one came here
    options.add_argument("--chapters", type=int, nargs="+", default=ladder.chapters(), help="default: %(default)s")
    options.add_argument("--add", action="store_true", help="keep the rows of other chapters that the result file has")
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
    result_options(options, "ladder_offline")
    options.add_argument("--engine", help=argparse.SUPPRESS)
    return options


def rows_before(args: Namespace) -> dict[str, Any]:
    """The rows that the result file has.

    Raises:
        ValueError: its workload was another.
    """
    if not args.add:
        return {}
    result = compare.read(args.json or RESULTS / f"{args.name}.json")
    data = result["data"]
    names = ("model", "seed", "requests", "scale", "max_output")
    now = vars(args) | {"model": Path(args.model).name}
    if other := [name for name in names if data[name] != now[name]]:
        raise ValueError(f"--add: {', '.join(other)} of the rows there differ: measure all chapters again")
    measured = f"{result.get('date')}, commit {result.get('commit')}"  # where the row does not say so itself
    return {name: {"measured": measured} | row for name, row in data["chapters"].items()}


def row_name(row: Mapping[str, Any]) -> str:
    """The chapter, and its attention where that is not the chapter's own."""
    return f"{row['chapter']} cuda" if row["attention"] == "cuda" else str(row["chapter"])


def main() -> None:
    args = parser().parse_args()
    if args.engine:
        chapter, attention = json.loads(args.engine)
        return fresh.give_back(run(chapter, attention, args))

    old = compare.read(args.compare) if args.compare else None
    kept, results = rows_before(args), []
    for engine in (bar := tqdm(engines(args.chapters, args.cuda), unit="engine")):
        bar.set_description(f"chapter {engine[0]}")
        what = f"the engine of chapter {engine[0]}"
        results.append(fresh.run("benchmarks.ladder_offline", "--engine", json.dumps(engine), what=what))
    device, dtype = results[0]["device"], getattr(torch, results[0]["dtype"])
    machine = offline.speeds(torch.device(device), dtype)
    prompts, outputs = offline.workload(args.seed, args.requests, args.scale, args.max_output)
    lengths = list(map(len, prompts))
    least = offline.limit(ModelConfig.from_folder(Path(args.model)), dtype, lengths, outputs, *machine.values())
    limit = {"seconds": least.seconds, "tokens_per_s": sum(outputs) / least.seconds}
    rows = kept | {row_name(row): row for row in (summary(done, limit["tokens_per_s"]) for done in results)}
    rows = dict(sorted(rows.items(), key=lambda named: (named[1]["chapter"], named[0])))
    for row in rows.values():  # those that were kept too: one limit for all
        row["fraction_of_limit"] = row["tokens_per_s"] / limit["tokens_per_s"]
    columns = ("chapter", "title", "attention", "kernels", "tokens_per_s", "fraction_of_limit", "ms_per_step")
    table([*rows.values()], *columns)
    options = {name: value for name, value in vars(args).items() if name not in NO_SETTINGS}
    data = options | {"model": Path(args.model).name, "dtype": results[0]["dtype"], "machine": machine}
    finish(args, data | {"limit": limit, "chapters": rows}, device, old)


if __name__ == "__main__":
    main()
