"""The command line of `minisgl bench serve`: its options, and what does not go together."""

from __future__ import annotations

import argparse
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import minisgl_hub as hub

from benchmarks.measure import engine_config, engine_options, result_options
from benchmarks.serving import own, report
from benchmarks.serving.load import Load
from benchmarks.serving.workloads import TOKEN_IDS, WORKLOADS
from minisgl.models.config import ModelConfig
from minisgl.server.remote import server_url

# Options of a workload's shape, for the workloads that have them.
SHAPES: dict[str, dict[str, Any]] = {
    "offline": {},
    "random": {"input": [100, 1024], "output": [100, 1024]},
    "shared-prefix": {"input": [32, 128], "output": [64, 256], "groups": 8, "shared": 1024},
    "multi-turn": {"input": [32, 256], "output": [64, 256], "turns": [2, 6], "think_s": 0.0},
}


def parser(doc: str | None) -> argparse.ArgumentParser:
    """All options; those that depend on others are filled in by `check`."""
    parser = argparse.ArgumentParser(
        "minisgl bench serve", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    server = parser.add_argument_group("server")
    server.add_argument("--url", help="of an OpenAI server that runs; by default `minisgl serve` is started")
    server.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", ""), help="default: $OPENAI_API_KEY")
    server.add_argument("--chat", action="store_true", help="ask /v1/chat/completions, not /v1/completions")
    server.add_argument("--stream", action=argparse.BooleanOptionalAction, default=True, help="default: --stream")
    server.add_argument("--label", default="", help="what the result calls the server, with its version for one")
    server.add_argument(
        "--server-flags", default="", metavar="FLAGS", help='more for `minisgl serve`, as "--a 1 --b 2"'
    )
    server.add_argument("--timeout-s", type=float, default=0.0, help="of a request; 0 has none (default: %(default)s)")
    load = parser.add_argument_group("load (by default all at once)")
    kind = load.add_mutually_exclusive_group()
    kind.add_argument("--rate", type=float, nargs="+", metavar="R", help="open loop: conversations a second, Poisson")
    kind.add_argument("--concurrency", type=int, nargs="+", metavar="C", help="closed loop: so many clients")
    work = parser.add_argument_group("workload")
    work.add_argument("--workload", choices=WORKLOADS, default="offline", help="default: %(default)s")
    work.add_argument("--requests", type=int, default=256, help="or conversations (default: %(default)s)")
    work.add_argument("--scale", type=float, default=1.0, help="multiplies all lengths (default: %(default)s)")
    pair: dict[str, Any] = {"type": int, "nargs": 2, "metavar": ("LOW", "HIGH")}
    shape = parser.add_argument_group("shape of random, shared-prefix and multi-turn")
    shape.add_argument("--input", **pair, help=f"tokens that a turn brings ({defaults('input')})")
    shape.add_argument("--output", **pair, help=f"tokens of an answer ({defaults('output')})")
    shape.add_argument("--groups", type=int, help=f"that begin alike ({defaults('groups')})")
    shape.add_argument("--shared", type=int, help=f"tokens that a group begins with ({defaults('shared')})")
    shape.add_argument("--turns", **pair, help=f"of a conversation ({defaults('turns')})")
    shape.add_argument("--think-s", type=float, help=f"before a turn, on average ({defaults('think_s')})")
    work.add_argument("--vocabulary", type=int, help="token ids are below it (default: the model's, at most 10,001)")
    work.add_argument("--temperature", type=float, default=0.6, help="default: %(default)s")
    work.add_argument("--seed", type=int, default=0, help="of the first pass (default: %(default)s)")
    work.add_argument("--passes", type=int, default=1, help="each with a seed more; medians count (default: 1)")
    work.add_argument(
        "--warmup", choices=("full", "short", "none"), help="default: full with --compare-llm, else short"
    )
    parser.add_argument("--slo", default="", help="for goodput: any of ttft=500ms,tpot=50ms,e2e=10s")
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="latency against throughput, and TTFT's spread")
    parser.add_argument("--compare-llm", action="store_true", help="the same requests through LLM.generate as well")
    parser.add_argument(
        "--detokenize",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="for --compare-llm: LLM.generate makes text, as the server does (default: --detokenize)",
    )
    result_options(parser, "serve")
    engine_options(parser)
    parser.add_argument("--llm-pass", type=int, help=argparse.SUPPRESS)
    return parser


def defaults(name: str) -> str:
    """For help: a shape option's default in each workload that has it."""
    found = {workload: shape[name] for workload, shape in SHAPES.items() if name in shape}
    return ", ".join(f"{workload}: {str(value).strip('[]').replace(',', '')}" for workload, value in found.items())


def check(args: Namespace) -> None:
    """Refuse what would be ignored, and fill in what depends on something else.

    Raises:
        ValueError: naming the option.
    """
    if args.url:
        args.url = server_url(args.url)
        flags = [flag for flag in own.engine_flags(args) if flag.startswith("--") and flag != "--model"]
        if flags or args.server_flags or args.compare_llm:
            flag = (flags + ["--server-flags"] * bool(args.server_flags) + ["--compare-llm"])[0]
            raise ValueError(f"{flag} is for a server that is started here: leave it or --url out")
    if args.compare_llm and (args.rate or args.concurrency or args.workload == "multi-turn" or args.chat):
        what = "--rate, --concurrency, multi-turn and --chat"
        raise ValueError(f"--compare-llm gives LLM.generate all requests at once: leave {what} out")
    args.slo = report.targets(args.slo)
    if not args.stream and args.slo.keys() - {"end_to_end_ms"}:
        raise ValueError("--slo: without --stream there is no time but e2e")
    shape = SHAPES[args.workload]
    for name in {name for each in SHAPES.values() for name in each}:
        if getattr(args, name) is None:
            setattr(args, name, shape.get(name))
        elif name not in shape:
            raise ValueError(f"--{name.replace('_', '-')} has no meaning for --workload {args.workload}")
    for name in ("requests", "passes", "groups", "shared"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name} is {value}, but must be at least 1")
    if any(value <= 0 for value in (args.rate or []) + (args.concurrency or [])):
        raise ValueError("--rate and --concurrency must be above 0")
    for name in ("input", "output", "turns"):
        low, high = getattr(args, name) or (1, 1)
        if not 1 <= low <= high:
            raise ValueError(f"--{name} is {low} {high}, but must be the least and the most, from 1")
    args.warmup = args.warmup or ("full" if args.compare_llm else "short")
    if args.vocabulary is None:
        args.vocabulary = TOKEN_IDS
        if not args.url:
            path = hub.resolve(engine_config(args).model, config_only=args.random_weights or False)
            args.vocabulary = min(TOKEN_IDS, ModelConfig.from_folder(path).vocab_size)


def loads(args: Namespace) -> list[Load]:
    """The points of the curve."""
    if args.rate:
        return [Load(rate=rate) for rate in args.rate]
    return [Load(concurrency=number) for number in args.concurrency or [0]]
