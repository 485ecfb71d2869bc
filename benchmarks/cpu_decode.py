"""One request on a CPU: our cached engine beside `transformers.generate`, same weights, same greedy tokens to write.

The two take turns in one process, so that a noisy machine is noisy for both; their ratio is what counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from tqdm import trange
from transformers import AutoModelForCausalLM

from benchmarks.record import save
from minisgl import EngineConfig, SamplingParams
from minisgl.llm import LLM
from minisgl.simple import cached_generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32", "float16"])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()

    llm = LLM(EngineConfig.chapter(2, device="cpu", dtype=args.dtype))
    theirs = AutoModelForCausalLM.from_pretrained(llm.path, dtype=llm.model.dtype)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(llm.model.config.vocab_size, (args.prompt_tokens,), generator=generator)
    params = SamplingParams(max_tokens=args.new_tokens, ignore_eos=True)

    def minisgl() -> None:
        assert len(list(cached_generate(llm.model, prompt.tolist(), params))) == args.new_tokens

    def transformers() -> None:
        n = args.new_tokens
        ids = prompt[None]
        out = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=n,
            max_new_tokens=n,
            pad_token_id=0,
        )
        assert out.shape[1] == args.prompt_tokens + n

    engines: dict[str, Callable[[], None]] = {"minisgl": minisgl, "transformers": transformers}
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for engine in engines.values():
        engine()  # warm-up
    for round_ in trange(args.rounds, desc="rounds"):
        for name in sorted(engines, reverse=round_ % 2 == 1):
            start = time.perf_counter()
            engines[name]()
            rates[name].append(args.new_tokens / (time.perf_counter() - start))

    ratios = [ours / peer for ours, peer in zip(rates["minisgl"], rates["transformers"], strict=True)]
    data = vars(args) | {
        "tokens_per_s": {name: _spread(values) for name, values in rates.items()},
        "ratio": _spread(ratios),
    }
    print(data)
    print(save(f"cpu_decode_{args.dtype}", data))


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


if __name__ == "__main__":
    main()
