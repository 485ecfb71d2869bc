"""One workload for every chapter's engine: what each chapter added, in tokens per second and in work.

Chats with two system prompts, questions that differ and answers of different lengths, all there from the start; greedy,
so that every engine must write the same tokens. Each engine runs in a process of its own; they take turns, and the
median of the rounds counts. The engines of chapters 1 and 2, which serve one request after another, get the first few
requests only: their speed does not depend on how many wait.

  minisgl bench ladder                  # on a CPU
  minisgl bench ladder --offline        # the workload of `minisgl bench offline`, for a GPU; has options of its own
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import asdict
from itertools import chain, count, takewhile
from statistics import mean, median
from typing import Any

from tqdm import tqdm

from benchmarks import compare, fresh
from benchmarks.measure import finish, result_options
from minisgl.config import EngineConfig
from minisgl.core import SamplingParams

TITLES = {1: "recompute everything", 2: "KV cache", 3: "paged pool", 4: "radix reuse", 5: "continuous batching"}
TITLES |= {6: "attention kernels", 7: "fused ops", 8: "CUDA graphs", 9: "tensor parallel", 10: "serving"}
ON_A_CPU = [1, 2, 3, 4, 5]  # where those after 5 differ from it in its C++ ops only
SYSTEM = [
    """You are the guide of a small museum of printing. You know its presses, its type cases and the people who worked
    here. Visitors ask about a machine, a trade or a date. Answer in plain words and in at most four sentences. Name
    the room in which an object stands if you know it: presses stand in the hall, type in the cellar, paper in the
    attic, books in the reading room. If a visitor asks about something that the museum does not have, say so and
    name the object that comes nearest. Do not guess dates: give a decade when you are not sure. Mention once, and
    only to visitors who ask about children, that the small press by the door may be tried with help. Prices,
    opening hours and tickets are at the desk, to which you send everyone who asks about them. Never repeat the
    question. End without a closing phrase.""",
    """You help the night shift of a weather station on an island. Observers write short notes, and you turn each into
    one line for the log or answer a question about an instrument. Temperatures are in degrees Celsius, wind in
    metres per second, pressure in hectopascal, visibility in kilometres. The barometer hangs in the office, the
    thermometers in the white hut, the anemometer on the mast, the rain gauge beside the path. If a value is
    missing, write a dash and do not invent one. If a note speaks of ice on the mast, the line begins with the word
    ICE. If a value has jumped since the last note, ask whether it was read twice. Keep the order: time,
    temperature, wind, pressure, visibility, remarks. Do not use abbreviations other than those in the table by the
    door. Write in the present tense, in at most four sentences.""",
]
QUESTIONS = [
    "How does the oldest press work?", "Who set the type for a newspaper?", "What was paper made of?",
    "Why are the letters mirrored?", "How many pages could one person print in a day?", "What is a type case?",
    "Is there anything for children?", "What replaced the hand press?", "How is ink made?", "What is a proof?",
    "Fog since midnight, almost no wind.", "How do I read the barometer?", "Snow, five below, wind from the north.",
    "What if the rain gauge is frozen?", "Pressure fell by six since the last note.", "When is visibility measured?",
]  # fmt: skip
NO_SETTINGS = {"only", "name", "json", "compare", "chapters"}
NAIVE = {1, 2}  # chapters whose engines serve one request after another


def workload(requests: int, most: int) -> list[tuple[list[dict[str, str]], int]]:
    """Chats, and the number of tokens to answer each with: from an eighth of `most` to `most`, each eight alike."""
    r = random.Random(0)
    lengths: list[int] = []
    while len(lengths) < requests:
        group = [round(most * eighths / 8) for eighths in range(1, 9)]
        r.shuffle(group)
        lengths += group
    return [
        (
            [{"role": "system", "content": " ".join(SYSTEM[i % 2].split())},
             {"role": "user", "content": QUESTIONS[(i % 2 * 10 + i // 2) % len(QUESTIONS)]}],
            lengths[i],
        )
        for i in range(requests)
    ]  # fmt: skip


def run(chapter: int, args: argparse.Namespace) -> dict[str, Any]:
    """One engine over its requests, after a warm-up; called in a fresh process."""
    from minisgl.llm import LLM

    switches = {name: getattr(args, name) for name in ("model", "device", "dtype", "kernels")}
    with LLM(EngineConfig.chapter(chapter, **switches, max_running_requests=args.batch)) as llm:
        chats = workload(args.requests, args.max_tokens)[: number_of_requests(chapter, args)]
        prompts = [llm.encode(chat) for chat, _ in chats]
        params = [SamplingParams(max_tokens=n, ignore_eos=True, detokenize=False) for _, n in chats]
        llm.generate([[1] * 40, [2] * 40], SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False))
        before = asdict(llm.work)
        done = llm.generate(prompts, params, progress=False)
        assert not any(completion.error for completion in done), done
        return {
            "prompt_tokens": sum(map(len, prompts)),
            "tokens": [completion.token_ids for completion in done],
            "seconds": max(completion.total_s for completion in done),
            "first_token_s": median(completion.first_token_s for completion in done),
            "work": {name: count - before[name] for name, count in asdict(llm.work).items()},
            "dtype": str(llm.model.dtype).removeprefix("torch."),
            "device": llm.device.type,
        }


def number_of_requests(chapter: int, args: argparse.Namespace) -> int:
    """All, or the first few for an engine that serves one after another."""
    return min(args.requests, args.naive_requests * chapter if chapter in NAIVE else args.requests)


def chapters() -> list[int]:
    """All that have an engine of their own; on one device that of chapter 9 is the one before."""
    numbers = takewhile(_has_engine, count(1))
    return [n for n in numbers if n == 1 or EngineConfig.chapter(n) != EngineConfig.chapter(n - 1)]


def _has_engine(chapter: int) -> bool:
    try:
        EngineConfig.chapter(chapter)
    except ValueError:
        return False
    return True


def agreement(rounds: dict[int, list[dict[str, Any]]]) -> float:
    """Of the answers that the naive engines wrote too, the share that every engine wrote alike in every round."""
    common = min(len(result["tokens"]) for result in chain(*rounds.values()))
    alike = [len({tuple(result["tokens"][i]) for result in chain(*rounds.values())}) == 1 for i in range(common)]
    return mean(alike)


def summary(chapter: int, results: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of the rounds, and the work, which is the same in each."""
    assert all(result["work"] == results[0]["work"] for result in results), "the same engine did different work"
    tokens = sum(map(len, results[0]["tokens"]))
    seconds = [result["seconds"] for result in results]
    work = results[0]["work"]
    return {
        "chapter": chapter,
        "title": TITLES[chapter],
        "requests": len(results[0]["tokens"]),
        "prompt_tokens": results[0]["prompt_tokens"],
        "output_tokens": tokens,
        "seconds": median(seconds),
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "tokens_per_s": tokens / median(seconds),
        "first_token_s": median(result["first_token_s"] for result in results),
        "work": work,
        "per_output_token": {name: work[name] / tokens for name in ("steps", "tokens_computed", "kv_bytes_read")},
    }


def main() -> None:
    if "--offline" in sys.argv:
        from benchmarks import ladder_offline

        return ladder_offline.main()
    parser = argparse.ArgumentParser(
        "minisgl bench ladder", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="default: %(default)s")
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    parser.add_argument("--dtype", default="auto", help="as of `minisgl generate` (default: %(default)s)")
    parser.add_argument("--kernels", default="torch", help="as of `minisgl generate` (default: %(default)s)")
    parser.add_argument("--chapters", type=int, nargs="+", default=ON_A_CPU, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--requests", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=8, help="requests side by side, from chapter 3 on (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=32, help="of the longest answer (default: %(default)s)")
    parser.add_argument(
        "--naive-requests",
        type=int,
        default=1,
        help="for chapter 1; twice as many for chapter 2 (default: %(default)s)",
    )
    result_options(parser, "ladder")
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        return fresh.give_back(run(args.only, args))
    old = compare.read(args.compare) if args.compare else None
    rounds: dict[int, list[dict[str, Any]]] = {chapter: [] for chapter in args.chapters}
    with tqdm(total=args.rounds * len(rounds), unit="run") as bar:
        for round_ in range(args.rounds):
            for chapter in sorted(rounds, reverse=round_ % 2 == 1):
                bar.set_description(f"chapter {chapter}")
                what = f"the engine of chapter {chapter}"
                rounds[chapter].append(fresh.run("benchmarks.ladder", "--only", str(chapter), what=what))
                bar.update()
    device, dtype = (next(chain(*rounds.values()))[name] for name in ("device", "dtype"))
    alike = agreement(rounds)
    assert alike == 1 or dtype != "float32", "the engines do not write the same tokens"
    options = {name: value for name, value in vars(args).items() if name not in NO_SETTINGS}
    data = options | {
        "device": device,
        "dtype": dtype,
        "common_answers_alike": alike,
        "chapters": {str(chapter): summary(chapter, results) for chapter, results in rounds.items()},
    }
    for chapter in data["chapters"].values():
        print(
            f"chapter {chapter['chapter']}: {chapter['tokens_per_s']:8.1f} tokens/s, first token after "
            f"{chapter['first_token_s']:6.2f} s; {chapter['per_output_token']['steps']:.2f} steps and "
            f"{chapter['per_output_token']['tokens_computed']:.1f} rows for each token of the answer"
        )
    finish(args, data, device, old)


if __name__ == "__main__":
    main()
