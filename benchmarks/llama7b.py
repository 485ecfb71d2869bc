"""A model of 7 billion parameters on one GPU, beside transformers: Llama-2-7B's shape with random weights.

- batch: 64 requests of 512 tokens in and 128 out, started together: time to the first token, and requests per second.
- alone: one such request; the bytes that a token needs, by the time between tokens, as a fraction of a copy's speed.

Each engine runs in a process of its own. transformers' `generate` takes all 64 as one batch, with its default cache.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import compare, fresh, offline
from benchmarks.measure import finish, medians, memory, result_options, serve
from benchmarks.timing import timed
from minisgl.config import EngineConfig
from minisgl.llm import LLM
from minisgl.models.config import ModelConfig

MODEL = str(Path(__file__).parent / "shapes/llama-2-7b")
FIGURES = ("seconds", "tokens_per_s", "requests_per_s", "first_token_ms", "token_ms")


def prompts(seed: int, requests: int, length: int) -> list[list[int]]:
    """Random token ids."""
    random = Random(f"llama {seed} {requests}")
    return [[random.randint(3, 10_000) for _ in range(length)] for _ in range(requests)]


def minisgl(args: argparse.Namespace) -> dict[str, Any]:
    """Our engine; `token_ms` is the mean time between a request's tokens."""
    switches = {"device": args.device, "dtype": args.dtype, "random_weights": True}
    with LLM(EngineConfig(model=args.model, **switches)) as llm:

        def run(seed: int, requests: int, output: int) -> dict[str, Any]:
            done = serve(llm, prompts(seed, requests, args.prompt), [output] * requests, args.temperature)
            rest = done["seconds"] - done["first_token_s"]
            return done | {"requests_per_s": requests / done["seconds"], "token_ms": 1000 * rest / (output - 1)}

        found = passes(run, args, warm=args.output)
        found |= {"memory": memory(llm), "stats": llm.stats(), "device": llm.device.type}
        found["dtype"] = str(llm.model.dtype).removeprefix("torch.")
    found["machine"] = offline.speeds(llm.device, llm.model.dtype)
    return found


def transformers(args: argparse.Namespace) -> dict[str, Any]:
    """transformers' own; all requests of a batch get their first token together."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    class Clock(BaseStreamer):
        """When the prompt and then each token came."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: Any) -> None:
            self.times.append(perf_counter())

        def end(self) -> None:
            pass

    name = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    device = torch.device(name)
    config = AutoConfig.from_pretrained(args.model)
    wanted = getattr(config, "dtype", None) if args.dtype == "auto" else args.dtype
    dtype = getattr(torch, str(wanted or "float32").removeprefix("torch.")) if device.type == "cuda" else torch.float32
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def run(seed: int, requests: int, output: int) -> dict[str, Any]:
        vocabulary = config.vocab_size
        rows = [[token % vocabulary for token in row] for row in prompts(seed, requests, args.prompt)]
        ids, clock = torch.tensor(rows, device=device), Clock()
        sampling = {"do_sample": True, "temperature": args.temperature, "top_k": 0, "top_p": 1.0}
        start = perf_counter()
        seconds = timed(
            lambda: model.generate(
                ids, attention_mask=torch.ones_like(ids), streamer=clock, max_new_tokens=output, **sampling
            ),
            device,
        )
        assert len(clock.times) == 1 + output, "an answer ended before its last token"
        first = clock.times[1] - start
        return {
            "seed": seed,
            "seconds": seconds,
            "tokens_per_s": requests * output / seconds,
            "requests_per_s": requests / seconds,
            "first_token_s": first,
            "first_token_ms": {"p50": 1000 * first, "p99": 1000 * first},
            "token_ms": 1000 * (clock.times[-1] - clock.times[1]) / (output - 1),
        }

    found = passes(run, args, warm=max(2, args.output // 8))
    found["memory"] = {"weight_bytes": sum(p.nbytes for p in model.parameters())}
    if device.type == "cuda":
        found["memory"]["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return found


ENGINES = {"minisgl": minisgl, "transformers": transformers}


def passes(run: Any, args: argparse.Namespace, warm: int) -> dict[str, Any]:
    """Both workloads, one pass a seed, behind a warm-up with answers of `warm` tokens; the medians."""
    found = {}
    for name, requests in (("batch", args.requests), ("alone", 1)):
        run(10**6, requests, warm)
        done = [run(seed, requests, args.output) for seed in args.seed]
        found[name] = {"requests": requests, "passes": done} | medians(done, *FIGURES)
    return found


def bytes_per_token(config: ModelConfig, dtype: torch.dtype, prompt: int, output: int) -> float:
    """What a decode step of one request must read, on average over its answer: weights, and all K and V up to there."""
    least = offline.limit(config, dtype, [prompt], [output], 1.0, float("inf"))
    return least.weight_bytes / output + least.kv_bytes / (output - 1)


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default=MODEL, help="a folder, of which the config is all that is used")
    options.add_argument("--device", default="auto", help="default: %(default)s")
    options.add_argument("--dtype", default="auto", help="as of `minisgl generate` (default: %(default)s)")
    options.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="default: both")
    options.add_argument("--requests", type=int, default=64, help="default: %(default)s")
    options.add_argument("--prompt", type=int, default=512, help="tokens of a prompt (default: %(default)s)")
    options.add_argument("--output", type=int, default=128, help="tokens of an answer (default: %(default)s)")
    options.add_argument("--temperature", type=float, default=0.6, help="default: %(default)s")
    options.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2], help="one pass each (default: 0 1 2)")
    result_options(options, "llama7b")
    options.add_argument("--only", choices=ENGINES, help=argparse.SUPPRESS)
    return options


def main() -> None:
    args = parser().parse_args()
    if args.only:
        return fresh.give_back(ENGINES[args.only](args))
    old = compare.read(args.compare) if args.compare else None
    found: dict[str, dict[str, Any]] = {}
    for engine in (bar := tqdm(args.engines, unit="engine")):
        bar.set_description(engine)
        found[engine] = fresh.run("benchmarks.llama7b", "--only", engine, what=engine)
    data = {"model": Path(args.model).name, "prompt_tokens": args.prompt, "output_tokens": args.output}
    data |= {"requests": args.requests, "temperature": args.temperature, "seeds": args.seed}
    data |= {"bandwidth_fraction": None} | found
    device = "cuda" if torch.cuda.is_available() and args.device != "cpu" else "cpu"
    if "minisgl" in found:
        own = found["minisgl"]
        data |= {name: own.pop(name) for name in ("machine", "dtype")}
        needed = bytes_per_token(
            ModelConfig.from_folder(Path(args.model)), getattr(torch, data["dtype"]), args.prompt, args.output
        )
        own["alone"]["bytes_per_token"] = needed
        speed = needed / (own["alone"]["token_ms"] / 1000)
        data["bandwidth_fraction"] = speed / data["machine"]["copy_bytes_per_s"]
        print(f"alone: {speed / 1e12:.3f} TB/s, {data['bandwidth_fraction']:.1%} of a copy")
    for engine, done in found.items():
        both, one = done["batch"], done["alone"]
        print(
            f"{engine}: {both['requests_per_s']:.2f} requests/s, first token after "
            f"{both['first_token_ms']['p50']:,.1f} ms; alone a token each {one['token_ms']:.3f} ms"
        )
    if len(found) == 2:
        ours, theirs = (found[engine]["batch"] for engine in ENGINES)
        data["times_faster"] = ours["requests_per_s"] / theirs["requests_per_s"]
        data["times_sooner"] = theirs["first_token_ms"]["p50"] / ours["first_token_ms"]["p50"]
    finish(args, data, device, old)


if __name__ == "__main__":
    main()
