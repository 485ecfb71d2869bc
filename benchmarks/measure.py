"""One pass of an LLM over requests with a time for every token, and the options that all of `minisgl bench` shares.

Knows no workload. A token's time is when `LLM.step` returned with it: with a step in flight that is after the GPU wrote
it, and when a caller has it.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks import compare
from benchmarks.record import save
from benchmarks.timing import timed
from minisgl.cli import add_fields, given_fields
from minisgl.config import EngineConfig
from minisgl.core import Request, SamplingParams
from minisgl.llm import LLM, Completion


class Steps:
    """Within, notes when each step of an LLM ended and which requests got a token in it: two appends a step.

    Args:
        after: called behind each step, with the requests that got a token in it.
    """

    def __init__(self, llm: LLM, after: Callable[[list[Request]], object] | None = None) -> None:
        self.llm, self.after = llm, after
        self.steps: list[tuple[float, list[Request]]] = []
        self._grown: list[Request] = []

    def __enter__(self) -> Steps:
        llm, engine = self.llm, self.llm.engine
        llm_step, engine_step = llm.step, engine.step

        def noted_engine_step() -> list[Request]:
            self._grown = engine_step()
            return self._grown

        def noted_llm_step() -> None:
            llm_step()
            self.steps.append((time.perf_counter(), self._grown))
            if self.after:
                self.after(self._grown)

        llm.step, engine.step = noted_llm_step, noted_engine_step  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        del self.llm.step, self.llm.engine.step  # the class's own come back

    def token_times(self, done: Sequence[Completion]) -> list[list[float]]:
        """When each token of each completion came, in seconds of time.perf_counter; one a step."""
        times: dict[int, list[float]] = defaultdict(list)
        for end, grown in self.steps:
            for request in grown:
                times[request.id].append(end)
        each = [times[completion.request_id][: len(completion.token_ids)] for completion in done]
        counts = [(len(own), len(completion.token_ids)) for own, completion in zip(each, done, strict=True)]
        assert all(steps == tokens for steps, tokens in counts), f"steps and tokens of each request: {counts}"
        return each


def serve(llm: LLM, prompts: Sequence[Sequence[int]], outputs: Sequence[int], temperature: float) -> dict[str, Any]:
    """Answer prompts of token ids that are all there from the start, each with as many tokens as asked for.

    Raises:
        ValueError: a request failed.
    """
    vocabulary = llm.model.config.vocab_size
    prompts = [[token % vocabulary for token in prompt] for prompt in prompts]
    params = [
        SamplingParams(max_tokens=n, temperature=temperature, ignore_eos=True, detokenize=False, seed=i)
        for i, n in enumerate(outputs)
    ]
    before = asdict(llm.work)
    done: list[Completion] = []
    with Steps(llm) as steps:
        seconds = timed(lambda: done.extend(llm.generate(prompts, params)), llm.device)
    if errors := [completion.error for completion in done if completion.error]:
        raise ValueError(f"{len(errors)} of {len(done)} requests failed, the first with: {errors[0]}")
    tokens = sum(len(completion.token_ids) for completion in done)
    assert tokens == sum(outputs)
    first = [completion.first_token_s for completion in done]
    between = [later - sooner for own in steps.token_times(done) for sooner, later in pairwise(own)]
    return {
        "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "first_token_s": median(first),
        "first_token_ms": percentiles_ms(first, 50, 99),
        "between_tokens_ms": percentiles_ms(between, 50, 90, 99),
        "work": {name: count - before[name] for name, count in asdict(llm.work).items()},
    }


def percentiles_ms(seconds: Sequence[float], *percents: int) -> dict[str, float] | None:
    """Percentiles in milliseconds, between the two nearest values where none falls on one; None of nothing."""
    if not seconds:
        return None
    return {f"p{percent}": 1000 * float(np.percentile(seconds, percent)) for percent in percents}


def medians(passes: Sequence[Mapping[str, Any]], *names: str) -> dict[str, Any]:
    """The median of several passes by figure; one that is made of several is taken apart."""
    found: dict[str, Any] = {}
    for name in names:
        values = [done[name] for done in passes]
        if any(value is None for value in values):
            found[name] = None
        else:
            found[name] = medians(values, *values[0]) if isinstance(values[0], dict) else median(values)
    return found


FIGURES = ("seconds", "tokens_per_s", "fraction_of_limit", "first_token_ms", "between_tokens_ms")


def memory(llm: LLM) -> dict[str, float | None]:
    """Bytes of the weights and of the KV pool; on a GPU also the most that was ever allocated, graphs included."""
    stats = llm.stats()
    peak = torch.cuda.max_memory_allocated(llm.device) if llm.device.type == "cuda" else None
    return {"weight_bytes": stats["weight_bytes"], "kv_pool_bytes": stats["kv_pool_bytes"], "peak_bytes": peak}


def options(what: str, doc: str | None, name: str) -> argparse.ArgumentParser:
    """A parser with what every benchmark of an LLM takes; its own options may follow, then `engine_options`."""
    parser = argparse.ArgumentParser(
        f"minisgl bench {what}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="one pass each (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.6, help="default: %(default)s")
    parser.add_argument("--no-idle", action="store_true", help="no profile of the GPU after the passes")
    result_options(parser, name)
    return parser


def result_options(parser: argparse.ArgumentParser, name: str) -> None:
    """Where the result goes, and what it is compared with."""
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the full result there, and not as --name")
    parser.add_argument(
        "--compare", metavar="FILE", type=Path, help="show each figure beside that of an earlier --json or result file"
    )
    parser.add_argument("--name", default=name, help="of the file in benchmarks/results (default: %(default)s)")


def engine_options(parser: argparse.ArgumentParser) -> None:
    """The engine's switches."""
    parser.add_argument("--chapter", type=int, help="the engine as it stands at the end of this chapter")
    add_fields(parser.add_argument_group("engine"), EngineConfig)


def engine_config(args: argparse.Namespace, **overrides: Any) -> EngineConfig:
    """What the engine's switches ask for."""
    switches = given_fields(EngineConfig, args) | overrides
    return EngineConfig(**switches) if args.chapter is None else EngineConfig.chapter(args.chapter, **switches)


def about(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    """What was measured, as it stands first in a result."""
    return {
        "model": llm.config.model,
        "dtype": str(llm.model.dtype).removeprefix("torch."),
        "chapter": args.chapter,
        "switches": given_fields(EngineConfig, args),
        "temperature": args.temperature,
    }


def finish(args: argparse.Namespace, data: Mapping[str, Any], device: str, old: compare.Result | None) -> None:
    """Write the result, say where, and show it beside the old one."""
    path = save(args.name, dict(data), device, args.json)
    print(path)
    if old is not None:
        compare.show(old, compare.read(path))
