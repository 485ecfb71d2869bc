"""What the clients of `minisgl bench serve` ask for. Knows no server.

All is drawn from a seed, before anything is sent. A conversation is a list of turns; most workloads have one turn each.
Two seeds share no beginning, so that a pass does not find the one before it in a prefix cache.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from benchmarks import offline

WORKLOADS = ("offline", "random", "shared-prefix", "multi-turn")
TOKEN_IDS = 10_001  # those of the offline workload are 0 … 10,000
# Short and frequent, so that most are one token with most tokenizers. How many came of them is in the server's usage.
_TEXT = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you
were all her she there would their we him been has when who will no more if out so up said what its about than into
them can only other time new some could these two may first then do any like my now over such our man me even most
made after also did many off before must well back through years where much your way down should because long
"""
WORDS = _TEXT.split()


@dataclass(frozen=True)
class Turn:
    """One request: what is new in its prompt, tokens to answer with, and how long its user thinks before."""

    tokens: list[int]
    max_tokens: int
    think_s: float = 0.0


Conversation = list[Turn]


def draw(args: Namespace, seed: int) -> list[Conversation]:
    """The conversations of one pass.

    Args:
        args: workload, requests (conversations of multi-turn), scale; input and output, the least and the most tokens
            of a turn; shared, tokens that a group begins with; groups; turns, the fewest and the most; think_s, on
            average; vocabulary, the number of token ids.
    """
    if args.workload == "offline":
        prompts, outputs = offline.workload(seed, args.requests, args.scale)
        drawn = [[Turn(prompt, n)] for prompt, n in zip(prompts, outputs, strict=True)]
    else:
        drawn = _draw(args, Random(f"{args.workload} {seed}"))
    return [[Turn([t % args.vocabulary for t in o.tokens], o.max_tokens, o.think_s) for o in own] for own in drawn]


def _draw(args: Namespace, random: Random) -> list[Conversation]:
    def tokens(low: int, high: int) -> list[int]:
        return [random.randrange(TOKEN_IDS) for _ in range(length(low, high))]

    def length(low: int, high: int) -> int:
        return max(1, round(args.scale * random.randint(low, high)))

    groups = args.groups if args.workload == "shared-prefix" else 0
    beginnings = [tokens(args.shared, args.shared) for _ in range(groups)]
    conversations = []
    for i in range(args.requests):
        turns = random.randint(*args.turns) if args.workload == "multi-turn" else 1
        own = [(tokens(*args.input), length(*args.output)) for _ in range(turns)]
        thought = [random.expovariate(1 / args.think_s) if j and args.think_s else 0.0 for j in range(turns)]
        conversation = [Turn(new, n, think_s) for (new, n), think_s in zip(own, thought, strict=True)]
        if beginnings:
            first = conversation[0]
            conversation[0] = Turn(beginnings[i % groups] + first.tokens, first.max_tokens)
        conversations.append(conversation)
    random.shuffle(conversations)
    return conversations


def arrivals(number: int, rate: float, seed: int) -> list[float]:
    """When each conversation begins, in seconds: a Poisson process of so many a second."""
    random, now, times = Random(f"arrivals {seed}"), 0.0, []
    for _ in range(number):
        now += random.expovariate(rate)
        times.append(now)
    return times


def as_text(tokens: Sequence[int]) -> str:
    """Words in place of token ids, one each."""
    return "".join(" " + WORDS[token % len(WORDS)] for token in tokens)
