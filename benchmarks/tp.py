"""Tensor parallel on several GPUs: the same tokens first, then speed by model, ranks, collective, graphs and batch.

- correct: the tests of tests/distributed that need GPUs, 200 scenarios of random traffic on each kind of engine, and
  greedy tokens in fp32 of the first model's shape with random weights, by any number of ranks those of one.
- speed: requests that start together. The median time of a decode step, tokens/s, the part of the GPU's time that is
  spent in all-reduces (waiting for the others included), and tokens/s beside as many single GPUs. Beside it stands the
  time that chapter 9's cost model predicts.

  make bench-tp                                    # all GPUs of this host
  python -m benchmarks.tp --models qwen3-0.6b --tp 1 2 --no-tests

Each engine has processes of its own. The result is written behind each, so that what was measured stays if a later one
fails. NCCL's use of NVLink multicast is off (NCCL_NVLS_ENABLE=0). More ranks than GPUs speak over gloo and take turns:
that shows that it runs, its times say nothing, and they are not written.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import ch09_bytes, fresh, idle, latency
from benchmarks.measure import medians, serve
from benchmarks.record import RESULTS, save
from minisgl.config import EngineConfig
from minisgl.core import SamplingParams
from minisgl.llm import LLM
from minisgl.models.config import ModelConfig

SHAPES = Path(__file__).parent / "shapes"
MODELS = ("qwen3-0.6b", "llama-2-7b", "qwen3-32b")
SIZES = (1, 2, 4, 8)
FIGURES = ("tokens_per_s", "first_token_ms", "between_tokens_ms")
GREEDY = SamplingParams(max_tokens=32, ignore_eos=True, temperature=0.0, detokenize=False)
SCENARIOS = "200"


@dataclass(frozen=True)
class Variant:
    """An engine to measure."""

    model: str
    tp: int
    collective: str  # "none" of one rank, "group" (NCCL; gloo on CPUs), or "peer": our kernel over peer memory
    graphs: str

    def config(self, device: str, **switches: Any) -> EngineConfig:
        """How the engine is switched."""
        folder = SHAPES / self.model
        switches |= {"model": str(folder if folder.is_dir() else self.model), "random_weights": True, "device": device}
        if self.tp > torch.cuda.device_count():
            switches["tp_backend"] = "gloo"
        return EngineConfig(tp=self.tp, custom_all_reduce=self.collective == "peer", graphs=self.graphs, **switches)

    def __str__(self) -> str:
        return f"{Path(self.model).name}, tp {self.tp}, {self.collective}, graphs {self.graphs}"


def variants(models: list[str], sizes: list[int], collectives: list[str], graphs: list[str]) -> list[Variant]:
    """All there are to measure, one rank first, since the others are compared with it; it has nobody to talk to."""
    found = []
    for model, tp, on in product(models, sorted(sizes), graphs):
        found += [Variant(model, tp, collective, on) for collective in (collectives if tp > 1 else ["none"])]
    return found


def greedy_tokens(variant: Variant, device: str) -> list[list[int]]:
    """What the model in fp32 answers to a few prompts."""
    with LLM(variant.config(device, dtype="float32")) as llm:
        prompts = latency.prompts(0, 8, 64)
        prompts = [[token % llm.model.config.vocab_size for token in prompt] for prompt in prompts]
        return [done.token_ids for done in llm.generate(prompts, GREEDY, progress=False)]


def speed(variant: Variant, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each batch."""
    rows = []
    with LLM(variant.config(args.device)) as llm:
        for batch in args.batch:

            def run(seed: int, batch: int = batch) -> dict[str, Any]:
                return serve(llm, latency.prompts(seed, batch, args.prompt), [args.output] * batch, temperature=0.6)

            run(10**6)  # a full warm-up
            passes = [run(seed) for seed in args.seed]
            found = medians(passes, *FIGURES) | {"batch": batch, "passes": [done["tokens_per_s"] for done in passes]}
            rows.append(asdict(variant) | found | {"step_ms": found["between_tokens_ms"]["p50"]})
        for row in rows:  # after all passes: the profiler may leave something behind
            row["all_reduce_share"] = all_reduce_share(llm, row["batch"], args.prompt)
    return rows


def all_reduce_share(llm: LLM, batch: int, prompt: int) -> float | None:
    """The part of decode steps in which rank 0's GPU sums, or waits in a sum; None without a GPU."""
    found = idle.profile_decode(llm, batch, prompt)
    if found is None:
        return None
    sums = sum(k.us for k in found.kernels if "nccl" in k.name.lower() or "all_reduce" in k.name)
    return sums / (found.kernels[-1].end - found.kernels[0].start)


def beside(rows: list[dict[str, Any]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows with what they are compared with: one rank with the same graphs, and the cost model's step."""
    alone = {(row["model"], row["graphs"], row["batch"]): row["tokens_per_s"] for row in rows if row["tp"] == 1}
    found = []
    for row in rows:
        one = alone.get((row["model"], row["graphs"], row["batch"]))
        shape = ModelConfig.from_folder(SHAPES / row["model"]) if (SHAPES / row["model"]).is_dir() else None
        context, link = args.prompt + args.output // 2, ch09_bytes.LINKS["nvlink"]
        predicted = shape and 1000 * ch09_bytes.predicted_step_s(shape, row["tp"], link, row["batch"], context)
        more = {"predicted_ms": predicted, "speed_up": None, "efficiency": None}
        if one:
            more |= {"speed_up": row["tokens_per_s"] / one, "efficiency": row["tokens_per_s"] / one / row["tp"]}
        found.append(row | more)
    return found


def check(args: argparse.Namespace) -> dict[str, Any]:
    """Raises SystemExit unless several ranks give the tokens of one."""
    if args.tests and torch.cuda.is_available():
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/distributed"]
        environment = fresh.environment() | {"MINISGL_SCENARIOS": SCENARIOS}
        if subprocess.run(command, cwd=RESULTS.parents[1], env=environment).returncode:
            raise SystemExit("wrong answers are not worth timing: the tests above failed")
    wanted, checked = None, []
    for variant in variants(args.models[:1], args.tp, args.collective, args.graphs):
        found = fresh.run("benchmarks.tp", "--only", json.dumps(["greedy_tokens", asdict(variant)]), what=str(variant))
        wanted = wanted or found
        if found != wanted:
            raise SystemExit(f"{variant}: other greedy tokens in fp32 than {checked[0]}")
        checked.append(str(variant))
    return {"scenarios": int(SCENARIOS) if args.tests else 0, "same_greedy_tokens": checked}


def parser() -> argparse.ArgumentParser:
    gpus = torch.cuda.device_count()
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--models", nargs="+", default=list(MODELS), help="shapes, or folders (default: %(default)s)")
    fitting = [size for size in SIZES if size <= max(1, gpus)]
    options.add_argument("--tp", type=int, nargs="+", default=fitting, help="ranks (default: %(default)s)")
    options.add_argument("--collective", nargs="+", choices=("group", "peer"), default=["group", "peer"])
    options.add_argument("--graphs", nargs="+", choices=("auto", "off"), default=["auto", "off"])
    options.add_argument("--batch", type=int, nargs="+", default=[1, 16, 256], help="default: %(default)s")
    options.add_argument("--prompt", type=int, default=512, help="tokens of a prompt (default: %(default)s)")
    options.add_argument("--output", type=int, default=128, help="tokens of an answer (default: %(default)s)")
    options.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2], help="one pass each (default: 0 1 2)")
    options.add_argument("--device", default="cuda" if gpus else "cpu", help="default: %(default)s")
    options.add_argument("--no-tests", dest="tests", action="store_false", help="compare greedy tokens only")
    options.add_argument("--name", default="tp", help="of the result file (default: %(default)s)")
    options.add_argument("--only", type=json.loads, help=argparse.SUPPRESS)
    return options


def main() -> None:
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    args = parser().parse_args()
    if args.only:
        what, variant = args.only[0], Variant(**args.only[1])
        return fresh.give_back(greedy_tokens(variant, args.device) if what == "greedy_tokens" else speed(variant, args))
    data: dict[str, Any] = {"gpus": torch.cuda.device_count(), "prompt_tokens": args.prompt, "correct": check(args)}
    data |= {"output_tokens": args.output, "seeds": args.seed, "nccl": {"NCCL_NVLS_ENABLE": "0"}}
    rows: list[dict[str, Any]] = []
    for variant in (bar := tqdm(variants(args.models, args.tp, args.collective, args.graphs), unit="engine")):
        bar.set_description(str(variant))
        rows += fresh.run("benchmarks.tp", "--only", json.dumps(["speed", asdict(variant)]), what=str(variant))
        data["rows"] = beside(rows, args)
        if max(args.tp) in range(2, torch.cuda.device_count() + 1):
            save(args.name, data, "cuda")
        for row in data["rows"][-len(args.batch) :]:
            gain = f", {row['speed_up']:.2f} times one rank" if row["speed_up"] else ""
            bar.write(f"{variant}, batch {row['batch']}: {row['step_ms']:.2f} ms a step{gain}")


if __name__ == "__main__":
    main()
