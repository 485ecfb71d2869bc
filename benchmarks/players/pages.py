"""One pool, cut in two ways: small pages, or a region for each request's longest possible answer.

The engine of chapter 3 answers the same requests in both; who holds which page is read from its own trace.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from benchmarks.record import save
from minisgl.config import EngineConfig
from minisgl.core import Request, SamplingParams
from minisgl.engine.engine import Engine
from minisgl.engine.trace import Trace
from minisgl.llm import LLM

SLOTS, CONTEXT = 64, 32  # of the pool, without the dummy page; and the longest sequence
CUTS = {"pages of 4": 4, "regions of 32": CONTEXT}
PROMPTS = [  # and the most new tokens
    ("The old lighthouse keeper writes down", 9),
    ("Salt,", 4),
    ("Ships wait outside the harbour because", 15),
    ("A lock lifts a boat by", 6),
    ("At night the keeper", 20),
    ("The fog came in from the sea and", 9),
]


def run(
    llm: LLM, jobs: Sequence[tuple[Sequence[int], int]], page_size: int, slots: int, context: int
) -> dict[str, Any]:
    """All jobs at once in a pool of so many slots: the trace's events, without its times; and the answers."""
    config = EngineConfig.chapter(
        3, page_size=page_size, kv_pages=slots // page_size + 1, max_model_len=context, device="cpu"
    )
    engine, lines = Engine(llm.model, config), list[str]()
    engine.trace["player"] = Trace(lines.append, engine.scheduler)
    requests = [Request(i, list(prompt), SamplingParams(max_tokens=n)) for i, (prompt, n) in enumerate(jobs)]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    engine.close()
    kept = ("batch", "waiting", "preempted", "finished", "tables", "free")
    steps = [{key: event[key] for key in kept} for event in map(json.loads, lines[1:])]
    for step in steps:
        step["finished"] = [request for request, _ in step["finished"]]
    return {
        "page_size": page_size,
        "pages": slots // page_size,
        "steps": steps,
        "answers": [r.output for r in requests],
    }


def record(
    llm: LLM, prompts: Sequence[tuple[str, int]] = PROMPTS, slots: int = SLOTS, context: int = CONTEXT
) -> dict[str, Any]:
    """The same requests with both cuts; their tokens, which must not depend on it, once."""
    jobs = [(llm.encode(text), output) for text, output in prompts]
    runs = {name: run(llm, jobs, size, slots, context) for name, size in CUTS.items()}
    answers = [each.pop("answers") for each in runs.values()]
    assert all(answer == answers[0] for answer in answers), "the cut changed an answer"
    return {
        "slots": slots,
        "requests": [
            {"prompt": len(prompt), "tokens": [llm.tokenizer.decode([token]) for token in [*prompt, *answer]]}
            for (prompt, _), answer in zip(jobs, answers[0], strict=True)
        ],
        "cuts": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--name", default="player_pages", help="of the result file (default: %(default)s)")
    args = parser.parse_args()
    llm = LLM(EngineConfig.chapter(3, model=args.model, device="cpu", dtype="float32", kv_pages=2))
    print(save(args.name, record(llm)))


if __name__ == "__main__":
    main()
