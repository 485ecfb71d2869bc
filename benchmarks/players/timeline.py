"""Six requests under three schedulers: what each step computes, and for whom.

The engine runs for real, with its own tokens; only its clock goes by rule (benchmarks/ch05_clock.py), so that all three
schedulers meet the same arrivals and a step takes the same time on every machine. Read from the engine's own trace.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from benchmarks.ch05_clock import Cost, switches
from benchmarks.record import save
from minisgl.config import EngineConfig
from minisgl.core import Request, SamplingParams
from minisgl.engine.engine import Engine
from minisgl.engine.trace import Trace
from minisgl.llm import LLM

MODES = ("static", "continuous", "mixed")
BUDGET = 64  # tokens of a step
LOG = "".join(
    f" At {hour} o'clock the {ship} came in with {load}."
    for hour, ship, load in [
        (5, "Alma", "forty barrels of salt"),
        (6, "Brigid", "wool and two passengers"),
        (8, "Cormoran", "nothing but ballast"),
        (9, "Dorothea", "tin from the western mines"),
        (11, "Estrella", "oranges, half of them spoiled"),
        (12, "Fulmar", "mail for the whole coast"),
    ]
)
PROMPTS = [  # when each comes, in milliseconds; its text; the most new tokens
    (0, "The lighthouse stands on", 14),
    (0, "Ships wait outside the harbour because", 5),
    (15, f"The harbour log.{LOG} To repeat: at 5 o'clock the Alma came in with", 8),
    (30, "A lock lifts a boat by", 6),
    (60, f"Two logs that are the same.{LOG}{LOG} To repeat: the oranges came with the", 5),
    (75, "At night the keeper", 8),
]


def run(llm: LLM, jobs: Sequence[tuple[float, Sequence[int], int]], mode: str, budget: int) -> dict[str, Any]:
    """The steps of one scheduler, and what it answered.

    Args:
        jobs: arrival in milliseconds, prompt, and length of the answer, by arrival.
    """
    config = switches(mode, max_batch_tokens=budget, max_running_requests=len(jobs), kv_pages=400)
    engine, lines = Engine(llm.model, config), list[str]()
    engine.trace["player"] = Trace(lines.append, engine.scheduler)
    requests = [
        Request(i, list(prompt), SamplingParams(max_tokens=output)) for i, (_, prompt, output) in enumerate(jobs)
    ]  # no stop ids: each answer has its full length
    steps, coming, now, cost = list[Any](), list(requests), 0.0, Cost()
    while coming or engine.has_work:
        if not engine.has_work:
            now = max(now, jobs[coming[0].id][0])
        while coming and jobs[coming[0].id][0] <= now:
            engine.add(coming.pop(0))
        engine.step()
        event = json.loads(lines[-1])
        now += cost.of(sum(n for *_, n in event["batch"]))
        steps.append({"end": round(now, 1), "rows": event["batch"], "waiting": event["waiting"]})
    engine.close()
    return {"steps": steps, "answers": [request.output for request in requests]}


def record(llm: LLM, prompts: Sequence[tuple[float, str, int]] = PROMPTS, budget: int = BUDGET) -> dict[str, Any]:
    """All modes on the same arrivals; the answers, which must not depend on the mode, once."""
    jobs = [(arrival, llm.encode(text), output) for arrival, text, output in prompts]
    runs = {mode: run(llm, jobs, mode, budget) for mode in MODES}
    answers = [each.pop("answers") for each in runs.values()]
    assert all(answer == answers[0] for answer in answers), "a schedule changed an answer"
    return {
        "budget": budget,
        "cost": vars(Cost()),
        "requests": [
            {
                "arrival": arrival,
                "text": text,
                "prompt": len(prompt),
                "answer": [llm.tokenizer.decode([token]) for token in answer],
            }
            for (arrival, prompt, _), (_, text, _), answer in zip(jobs, prompts, answers[0], strict=True)
        ],
        "modes": {mode: each["steps"] for mode, each in runs.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--name", default="player_timeline", help="of the result file (default: %(default)s)")
    args = parser.parse_args()
    llm = LLM(EngineConfig.chapter(5, model=args.model, device="cpu", dtype="float32", kv_pages=2))
    print(save(args.name, record(llm)))


if __name__ == "__main__":
    main()
