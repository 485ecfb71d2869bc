"""A decode step on the GPU's clock, before graphs and with them: every kernel, and what the host did meanwhile.

For each chapter's engine and each batch: the kernels that one step of the host started, the host's calls of CUDA in
that step, and figures over more than a dozen steps (idle share, kernels, host time).
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import compare, idle
from benchmarks.gpu import table
from benchmarks.measure import finish, result_options
from minisgl.config import EngineConfig
from minisgl.llm import LLM

MODEL = str(Path(__file__).parent / "shapes/qwen3-0.6b")


def record(llm: LLM, batch: int, prompt: int) -> dict[str, Any]:
    """One step's timeline, and figures of several.

    Raises:
        ValueError: the engine never ran that many side by side.
    """
    found = idle.profile_decode(llm, batch, prompt)
    if found is None:
        raise ValueError(f"{batch} requests of {prompt} tokens never ran side by side")
    return {"batch": batch, "prompt_tokens": prompt} | idle.summary(found) | idle.timeline(found)


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default=MODEL, help="a folder, of which the config is all that is used")
    options.add_argument("--chapters", type=int, nargs="+", default=[7, 8], help="default: %(default)s")
    options.add_argument("--batch", type=int, nargs="+", default=[1, 16, 256], help="default: %(default)s")
    options.add_argument("--prompt", type=int, default=512, help="tokens (default: %(default)s)")
    options.add_argument("--dtype", default="auto", help="as of `minisgl generate` (default: %(default)s)")
    result_options(options, "ch08_timeline")
    return options


def main() -> None:
    args = (options := parser()).parse_args()
    if not torch.cuda.is_available():
        options.error("this measures an NVIDIA GPU, and torch finds none")
    old = compare.read(args.compare) if args.compare else None
    switches = {"model": args.model, "device": "cuda", "dtype": args.dtype, "random_weights": True}
    configs = {chapter: EngineConfig.chapter(chapter, **switches) for chapter in args.chapters}
    steps: dict[str, dict[str, Any]] = {}
    rows = []
    for chapter, config in (bar := tqdm(configs.items(), unit="engine")):
        bar.set_description(f"chapter {chapter}")
        with LLM(config) as llm:
            steps[str(chapter)] = {str(batch): record(llm, batch, args.prompt) for batch in args.batch}
        del llm
        gc.collect()
        torch.cuda.empty_cache()
        rows += [{"chapter": chapter, **step} for step in steps[str(chapter)].values()]
    table(
        rows,
        "chapter",
        "batch",
        "kernels_per_step",
        "kernel_ms",
        "step_ms",
        "gpu_step_ms",
        "idle_share",
        "starved_share",
        "host_ms",
    )
    data = {"model": Path(args.model).name, "prompt_tokens": args.prompt, "chapters": steps}
    finish(args, data, "cuda", old)


if __name__ == "__main__":
    main()
