"""A decode step's kernels and the host's calls, for the player of chapter 8: before fusing, fused, and from a graph.

With an NVIDIA GPU the engines of chapters 6, 7 and 8 are profiled, one step of each. Without one, `--recorded NAME`
takes the steps that results/NAME.json holds (benchmarks/ch08_timeline.py wrote it), with the circumstances of those.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
from typing import Any

import torch

from benchmarks import ch08_timeline
from benchmarks.idle import WAITS
from benchmarks.record import RESULTS, load, save
from minisgl.config import EngineConfig
from minisgl.llm import LLM

NAME = "player_kernels"
TITLES = {"6": "chapter 6: torch's ops", "7": "chapter 7: fused", "8": "chapter 8: from a graph"}
BATCH, PROMPT = 16, 512
KINDS = {  # of kernels, by name; what is neither is small: a norm, a rotation, an activation, sampling
    "attention": re.compile(r"^decode_kernel|flash|attention"),
    "product": re.compile(r"nvjet|product_kernel|cublas|gemm|gemv|cutlass|splitK", re.IGNORECASE),
}
FIGURES = ("idle_share", "step_ms", "gpu_step_ms", "kernel_ms", "host_step_us")


def kind(name: str) -> str:
    """What a kernel is: attention, product or small."""
    return next((kind for kind, pattern in KINDS.items() if pattern.search(name)), "small")


def columns(spans: dict[str, list[Any]]) -> tuple[list[str], str]:
    """The names that occur, and `name,start,length;…`: a name's place, tenths of a microsecond since the last start."""
    names, before, parts = list(dict.fromkeys(spans["name"])), 0, list[str]()
    for name, start_us, us in zip(spans["name"], spans["start_us"], spans["us"], strict=True):
        start = round(10 * start_us)
        parts.append(f"{names.index(name)},{start - before},{round(10 * us)}")
        before = start
    return names, ";".join(parts)


def compact(step: dict[str, Any], in_flight: bool) -> dict[str, Any]:
    """A step as the player reads it.

    Args:
        step: as `ch08_timeline.record` returns it.
        in_flight: whether the step before was still under way when the host began with this one.
    """
    kernel_names, kernels = columns(step["kernels"])
    call_names, calls = columns(step["calls"])
    return {
        "in_flight": in_flight,
        **{name: round(step[name], 3) for name in FIGURES},
        "names": kernel_names,
        "kinds": [kind(name) for name in kernel_names],
        "kernels": kernels,
        "call_names": call_names,
        "waits": [bool(WAITS.search(name)) for name in call_names],
        "calls": calls,
    }


def frames(chapters: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The player's data, from each chapter's step."""
    return {
        "batch": BATCH,
        "steps": {
            TITLES[chapter]: compact(step, EngineConfig.chapter(int(chapter)).overlap != "off")
            for chapter, step in chapters.items()
        },
    }


def measured() -> dict[str, dict[str, Any]]:
    """A step of each chapter's engine, profiled on this machine's GPU."""
    switches = {"model": ch08_timeline.MODEL, "device": "cuda", "random_weights": True}
    steps = {}
    for chapter in TITLES:
        with LLM(EngineConfig.chapter(int(chapter), **switches)) as llm:
            steps[chapter] = ch08_timeline.record(llm, BATCH, PROMPT)
        del llm
        gc.collect()
        torch.cuda.empty_cache()
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recorded", metavar="NAME", help="take the steps of results/NAME.json: ch08_timeline")
    args = parser.parse_args()
    if args.recorded:
        record = load(args.recorded)
        chapters = {chapter: steps[str(BATCH)] for chapter, steps in record["data"]["chapters"].items()}
        command = f"python -m benchmarks.players.kernels --recorded {args.recorded}"
        record |= {"name": NAME, "command": command, "data": frames(chapters)}
        (path := RESULTS / f"{NAME}.json").write_text(json.dumps(record, indent=1) + "\n")
    elif torch.cuda.is_available():
        path = save(NAME, frames(measured()), "cuda")
    else:
        parser.error("this profiles an NVIDIA GPU, and torch finds none: use --recorded ch08_timeline")
    print(path)


if __name__ == "__main__":
    main()
