"""A server under load: how many tokens and requests a second, how soon the first token, how steadily the rest.

Without --url it starts `minisgl serve` with the engine's switches and ends it. With --url it measures any OpenAI
server, so that others can stand beside it: it asks for the model's name, sends token ids where they are taken (text
elsewhere), and counts tokens by the server's own usage.

  minisgl bench serve --requests 16 --scale 0.1                              # a small machine; all at once
  minisgl bench serve --rate 1 2 4 8 --slo ttft=500ms,tpot=50ms --plot curve.png
  minisgl bench serve --workload multi-turn --concurrency 32 --think-s 1
  minisgl bench serve --url http://127.0.0.1:8000 --workload random --input 100 200 --output 50 50
  minisgl bench serve --compare-llm --passes 3                               # beside LLM.generate, in turns
"""

from __future__ import annotations

import asyncio
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from tqdm import tqdm

from benchmarks import compare, fresh
from benchmarks.measure import engine_config, finish, medians
from benchmarks.serving import options, own, plot, report
from benchmarks.serving.client import Server, discover, session
from benchmarks.serving.load import Load, Pass, run
from benchmarks.serving.workloads import Conversation, draw
from minisgl.cli import given_fields
from minisgl.config import EngineConfig
from minisgl.core import SamplingParams
from minisgl.engine.build import choose_device
from minisgl.llm import LLM

WARM_SEED = 10**6  # other prompts than those measured, which would be found in the prefix cache
LOAD_SEED = 1000  # between two loads' seeds, for the same reason
SETTINGS = ("workload", "requests", "scale", "input", "output", "groups", "shared", "turns", "think_s", "temperature")
SETTINGS += ("seed", "passes", "warmup", "slo", "chat", "stream")


def parser() -> ArgumentParser:
    return options.parser(__doc__)


def warming(args: Namespace) -> list[Conversation]:
    """What is asked before the clock runs."""
    if args.warmup == "none":
        return []
    conversations = draw(args, WARM_SEED)
    if args.warmup == "full":
        return conversations
    return [[replace(turn, max_tokens=min(8, turn.max_tokens)) for turn in turns[:1]] for turns in conversations[:8]]


@contextmanager
def server(args: Namespace) -> Iterator[str]:
    """The address of what is measured."""
    if args.url:
        yield args.url
        return
    queue = ["--max-queue", str(max(1024, args.requests))]  # what is refused is no load, unless it is asked for
    with own.running([*own.engine_flags(args), *queue, *shlex.split(args.server_flags)]) as url:
        yield url


async def measure(url: str, args: Namespace, passes: Sequence[int]) -> tuple[Server, dict[str, list[Pass]]]:
    """All loads, each so many times, on a server that runs.

    Args:
        passes: their numbers, from 0.
    """
    found: dict[str, list[Pass]] = {str(load): [] for load in options.loads(args)}
    asked = Server(url, args.api_key, (args.model or "") if args.url else "", args.chat, args.stream, args.temperature)
    async with session(args.timeout_s) as http:
        asked = await discover(http, asked, args.vocabulary)
        await run(http, asked, warming(args), Load(), WARM_SEED)
        for i in passes:
            for j, load in enumerate(options.loads(args)):
                conversations = draw(args, seed := args.seed + i + LOAD_SEED * j)
                with tqdm(total=sum(map(len, conversations)), desc=str(load), unit="request") as bar:
                    found[str(load)].append(await run(http, asked, conversations, load, seed, bar.update))
    return asked, found


def loop(main: Any) -> Any:
    """asyncio.run on uvloop, where there is one: less of the client's own time."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


def point(passes: Sequence[Pass], slo: dict[str, float]) -> dict[str, Any]:
    """Medians of some passes; what failed is added up."""
    each = [report.summary(done, slo) for done in passes]
    totals = {name: sum((Counter(one[name]) for one in each), Counter()) for name in ("errors", "finish_reasons")}
    counts = ("requests", "completed", "prompt_tokens", "cached_tokens", "output_tokens", "asked_tokens", "slo_met")
    found = {name: each[0][name] for name in counts} | {name: dict(total) for name, total in totals.items()}
    found["first_error"] = next((one["first_error"] for one in each if one["first_error"]), "")
    worst = {name: max(one["client"][name] for one in each) for name in each[0]["client"]}
    return found | medians(each, *report.FIGURES) | {"client": worst, "passes": each}


def llm_pass(args: Namespace, llm: LLM, seed: int) -> dict[str, Any]:
    """The requests of one pass through LLM.generate, behind the same warm-up."""
    for conversations in (warming(args), draw(args, seed)):
        turns = [turn for [turn] in conversations]
        params = [
            SamplingParams(
                turn.max_tokens, temperature=args.temperature, ignore_eos=True, seed=i, detokenize=args.detokenize
            )
            for i, turn in enumerate(turns)
        ]
        start = perf_counter()
        done = llm.generate([turn.tokens for turn in turns], params, progress=False)
        seconds = perf_counter() - start
    if errors := [completion.error for completion in done if completion.error]:
        raise ValueError(f"{len(errors)} of {len(done)} requests failed, the first with: {errors[0]}")
    tokens = sum(len(completion.token_ids) for completion in done)
    return {"output_tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds}


def beside_llm(args: Namespace) -> tuple[Server, dict[str, list[Pass]], dict[str, Any]]:
    """Server and LLM.generate in turns. On a GPU, whose memory either takes, each pass has fresh processes; on a CPU
    both stay, so that two passes that are compared follow each other at once."""
    served, direct = [], []

    def take_turns(serve: Callable[[int], Any], generate: Callable[[int], Any]) -> None:
        for i in range(args.passes):
            if i % 2:
                direct.append(generate(i))
            served.append(serve(i))
            if not i % 2:
                direct.append(generate(i))

    def serve_afresh(i: int) -> Any:
        with server(args) as url:
            return loop(measure(url, args, [i]))

    def generate_afresh(i: int) -> Any:
        return fresh.run("benchmarks.serve", "--llm-pass", str(args.seed + i), what="LLM.generate")

    if choose_device(args.device or "auto").type == "cpu":
        with LLM(engine_config(args)) as llm, server(args) as url:
            take_turns(lambda i: loop(measure(url, args, [i])), lambda i: llm_pass(args, llm, args.seed + i))
    else:
        take_turns(serve_afresh, generate_afresh)
    [name] = served[0][1]
    passes = [done for _, found in served for done in found[name]]
    speeds = [report.summary(done, {})["tokens_per_s"] for done in passes]
    ratios = [speed / one["tokens_per_s"] for speed, one in zip(speeds, direct, strict=True)]
    facts = {"detokenize": args.detokenize, "ratio": median(ratios), "ratios": ratios, "passes": direct}
    return served[0][0], {name: passes}, facts | medians(direct, "seconds", "tokens_per_s")


def about(args: Namespace, asked: Server) -> dict[str, Any]:
    """What was measured, as it stands first in a result."""
    takes = {name: getattr(asked, name) for name in ("token_ids", "ignore_eos", "counts")}
    return {
        "model": asked.model,
        "server": args.label or ("an OpenAI server" if args.url else "minisgl serve"),
        "takes": takes,
        "switches": given_fields(EngineConfig, args),
        "chapter": args.chapter,
    } | {name: value for name in SETTINGS if (value := getattr(args, name)) is not None}


def hide_key() -> None:
    """The command line stands in the result; a key must not."""
    for i, arg in enumerate(sys.argv):
        if arg.startswith("--api-key="):
            sys.argv[i] = "--api-key=…"
        elif sys.argv[i - 1] == "--api-key":
            sys.argv[i] = "…"


def main() -> None:
    args = parser().parse_args()
    options.check(args)
    if args.llm_pass is not None:
        with LLM(engine_config(args)) as llm:
            return fresh.give_back(llm_pass(args, llm, args.llm_pass))

    hide_key()
    old = compare.read(args.compare) if args.compare else None
    beside: dict[str, Any] | None = None
    if args.compare_llm:
        asked, found, beside = beside_llm(args)
    else:
        with server(args) as url:
            asked, found = loop(measure(url, args, range(args.passes)))
    points = {name: point(passes, args.slo) for name, passes in found.items()}
    for name, figures in points.items():
        print("\n".join(report.lines(name, figures)))
    if beside is not None:
        spread = ", ".join(f"{ratio:.3f}" for ratio in beside["ratios"])
        text = "" if args.detokenize else ", which made no text"
        print(f"tokens/s through the server against LLM.generate{text}: {beside['ratio']:.1%} (passes: {spread})")
    if args.plot:
        first_ms = {
            name: [1000 * (s.times[0] - s.planned) for done in passes for s in done.samples if not s.error and s.times]
            for name, passes in found.items()
        }
        plot.save(args.plot, f"{about(args, asked)['server']}: {asked.model}, {args.workload}", points, first_ms)
        print(args.plot)
    here = not args.url or urlsplit(args.url).hostname in ("127.0.0.1", "localhost", "::1")
    device = choose_device(args.device or "auto").type if here else "cpu"
    finish(args, about(args, asked) | {"llm": beside, "loads": points}, device, old)
    if not any(figures["completed"] for figures in points.values()):
        raise ValueError("no request was completed")


if __name__ == "__main__":
    main()
