"""One request and eight on a CPU: our engine beside `transformers.generate`, same weights, same prompts.

The two take turns in one process, so that a noisy machine is noisy for both; their ratio is what counts. The eight
prompts have different lengths: transformers gets them padded on the left, with an attention mask. Our prefix cache is
off, or the second round would find the prompts of the first.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from benchmarks.record import save
from minisgl.cli import add_fields, given_fields
from minisgl.config import EngineConfig
from minisgl.core import SamplingParams
from minisgl.llm import LLM

LENGTHS = [64, 24, 112, 40, 128, 16, 88, 56]  # of the eight prompts; the first goes alone, too


def pad_left(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask [B, longest]."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def alternate(
    engines: dict[str, Callable[[list[list[int]]], list[list[int]]]], prompts: list[list[int]], args: argparse.Namespace
) -> dict[str, Any]:
    """Both engines over the same prompts, round after round, each going first every other time."""
    answers = {name: engine(prompts) for name, engine in engines.items()}  # the warm-up
    tokens = len(prompts) * args.new_tokens
    assert all(sum(map(len, answer)) == tokens for answer in answers.values())
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for round_ in tqdm(range(args.rounds), desc=f"{len(prompts)} at once"):
        for name in sorted(engines, reverse=round_ % 2 == 1):
            start = time.perf_counter()
            engines[name](prompts)
            rates[name].append(tokens / (time.perf_counter() - start))
    ratios = [ours / theirs for ours, theirs in zip(rates["minisgl"], rates["transformers"], strict=True)]
    pairs = zip(*answers.values(), strict=True)
    return {
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "tokens_per_s": {name: spread(values) for name, values in rates.items()},
        "ratio": spread(ratios),
        "answers_alike": sum(ours == theirs for ours, theirs in pairs),  # in 16 bits close choices may fall either way
    }


def spread(values: list[float]) -> dict[str, float]:
    """The median and the ends."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new-tokens", type=int, default=64, help="for each prompt (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="default: %(default)s")
    parser.add_argument("--name", help="of the result file (default: cpu_batch_ and the dtype)")
    add_fields(parser.add_argument_group("engine"), EngineConfig)
    args = parser.parse_args()

    switches = {"device": "cpu", "dtype": "bfloat16", "prefix_cache": "none"} | given_fields(EngineConfig, args)
    llm = LLM(EngineConfig(**switches))
    theirs = AutoModelForCausalLM.from_pretrained(llm.path, dtype=llm.model.dtype)
    params = SamplingParams(max_tokens=args.new_tokens, ignore_eos=True, detokenize=False)
    generator = torch.Generator().manual_seed(0)
    vocabulary = llm.model.config.vocab_size
    prompts = [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in LENGTHS]

    def minisgl(prompts: list[list[int]]) -> list[list[int]]:
        return [completion.token_ids for completion in llm.generate(prompts, params, progress=False)]

    def transformers(prompts: list[list[int]]) -> list[list[int]]:
        ids, mask = pad_left(prompts)
        n = args.new_tokens
        out = theirs.generate(
            ids, attention_mask=mask, do_sample=False, min_new_tokens=n, max_new_tokens=n, pad_token_id=0
        )
        rows: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return rows

    engines = {"minisgl": minisgl, "transformers": transformers}
    dtype = str(llm.model.dtype).removeprefix("torch.")
    data = {
        "dtype": dtype,
        "new_tokens": args.new_tokens,
        "rounds": args.rounds,
        "switches": switches,
        "batches": {str(n): alternate(engines, prompts[:n], args) for n in args.batches},
    }
    for n, batch in data["batches"].items():
        ours, peer, ratio = (*(batch["tokens_per_s"][name] for name in engines), batch["ratio"])
        print(
            f"{n} at once: {ours['median']:.1f} tokens/s, transformers {peer['median']:.1f}; "
            f"ratio {ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"
        )
    print(save(args.name or f"cpu_batch_{dtype}", data))


if __name__ == "__main__":
    main()
