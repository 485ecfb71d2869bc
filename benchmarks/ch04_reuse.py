"""What the prefix cache saves: chapter 4's engine with the radix tree beside the same engine without it.

With the course's model:
- shared: one system prompt of about 1,000 tokens, several questions; time to first token of each request.
- curve: time to first token of a prompt of 1,024 tokens, of which the first n were computed for somebody before.
- workloads: hit rate, tokens computed and time to first token of three kinds of traffic, one request after another.

Without a model, exact on every machine:
- policies: hit rates of lru, lfu and fifo for documents that are asked for in three patterns, by the size of the pool.
- together: equal prompts that arrive in the same step, or one after another.
- tree: microseconds of the tree's own operations.
"""

from __future__ import annotations

import argparse
import random
from statistics import median
from timeit import timeit
from typing import Any

from tqdm import tqdm

from benchmarks.record import save
from minisgl.config import EngineConfig
from minisgl.core import Request, SamplingParams
from minisgl.engine.engine import Engine
from minisgl.kvcache.cache_manager import CacheManager
from minisgl.kvcache.pages import PageAllocator
from minisgl.kvcache.radix_cache import POLICIES, RadixCache
from minisgl.llm import LLM, Completion
from minisgl.scheduler.scheduler import Scheduler

SYSTEM_TOKENS = 1000  # of the shared system prompt, at least
CURVE_TOKENS = 1024
SHARED = [0, 128, 256, 512, 768, 896, 1008]
QUESTIONS = [
    "May I moor here overnight?",
    "Where do I throw away old oil?",
    "My mast is 19 metres high. Does it fit under the bridge?",
    "When does the lock open on Sundays?",
    "Who may use the crane?",
    "How fast may I sail in the outer basin?",
]
REVIEWS = [
    ("The lamp broke on the second evening.", "negative"),
    ("A warm coat, and it keeps the rain out.", "positive"),
    ("The map arrived late and torn at the fold.", "negative"),
    ("My children read this book every night.", "positive"),
    ("The kettle whistles so loudly that I sold it.", "negative"),
    ("Strong rope, fair price, quick delivery.", "positive"),
    ("It does what it says, and nothing else.", "neutral"),
    ("The second pair fits like the first one did ten years ago.", "positive"),
]
ASKED = [
    "The paint never dried.",
    "Best bread knife I have owned.",
    "The radio hums, but only a little.",
    "Two of the six glasses were broken.",
    "It is a chair.",
    "I bought three more for my friends.",
]
CHATS = [
    ["What is a lighthouse?", "Who keeps it?", "Are there any left today?", "Say that in one sentence."],
    ["Name a river in France.", "How long is it?", "Which towns lie on it?", "Say that in one sentence."],
]
PAGE_SIZE, KV_PAGES = 16, 800
DOCUMENT_PAGES = 8


def system_prompt(llm: LLM) -> str:
    """The rules of a harbour, long enough for SYSTEM_TOKENS."""
    text = "You answer for the harbour office. Be brief. These are the rules of the harbour."
    for i in range(1, 1000):
        text += (
            f" Rule {i}: berth {(i * 7) % 40 + 1} is for boats of up to {i % 9 + 6} metres, and the fee is {i % 5 + 3}."
        )
        if len(llm.encode([{"role": "system", "content": text}])) >= SYSTEM_TOKENS:
            return text
    raise AssertionError("unreachable: each rule has tokens")


def use(llm: LLM, prefix_cache: str) -> None:
    """Give the loaded model a fresh engine, with or without the tree."""
    config = EngineConfig.chapter(4, prefix_cache=prefix_cache, page_size=PAGE_SIZE, kv_pages=KV_PAGES)
    llm.engine = Engine(llm.model, config)


def ask(llm: LLM, prompt: list[int], new_tokens: int = 1, salt: str = "") -> Completion:
    """One request, alone."""
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=new_tokens == 1, cache_salt=salt)
    [completion] = llm.generate([prompt], params)
    return completion


def serve(llm: LLM, prompts: list[list[int]], prefix_cache: str) -> dict[str, Any]:
    """Prompts one after another on a fresh engine: what each cost until its first token."""
    use(llm, prefix_cache)
    return summary([ask(llm, prompt) for prompt in prompts])


def summary(done: list[Completion]) -> dict[str, Any]:
    """Counts and times of a sequence of requests that ran alone."""
    total, found = sum(c.prompt_tokens for c in done), sum(c.cached_tokens for c in done)
    return {
        "prompt_tokens": [c.prompt_tokens for c in done],
        "cached_tokens": [c.cached_tokens for c in done],
        "first_token_ms": [1e3 * c.first_token_s for c in done],
        "total_prompt_tokens": total,
        "prompt_tokens_computed": total - found,
        "hit_rate": found / total,
        "mean_first_token_ms": 1e3 * sum(c.first_token_s for c in done) / len(done),
    }


def shared(llm: LLM, repeats: int) -> dict[str, Any]:
    """One long system prompt; medians over repetitions, each with a cold tree."""
    system = {"role": "system", "content": system_prompt(llm)}
    prompts = [llm.encode([system, {"role": "user", "content": question}]) for question in QUESTIONS]
    common = next(n for n, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1)
    runs: dict[str, list[dict[str, Any]]] = {"none": [], "radix": []}
    for _ in tqdm(range(repeats), desc="shared"):
        for name, done in runs.items():
            done.append(serve(llm, prompts, name))
    data: dict[str, Any] = {"system_tokens": common}
    for name, done in runs.items():
        times = [median(ms) for ms in zip(*(run["first_token_ms"] for run in done), strict=True)]
        mean = sum(times) / len(times)
        data[name] = done[0] | {"first_token_ms": times, "mean_first_token_ms": mean}
    first, second = data["radix"]["first_token_ms"][:2]
    reused = data["radix"]["cached_tokens"][1]
    return data | {
        "first_over_second": first / second,
        "second_reused_pages": reused // PAGE_SIZE,
        "second_computed": data["radix"]["prompt_tokens"][1] - reused,
        "same_requests_without": data["none"]["first_token_ms"][1] / second,
    }


def curve(llm: LLM, lengths: list[int], repeats: int) -> list[dict[str, Any]]:
    """A prompt of CURVE_TOKENS whose first n tokens are in the tree; the rest is new."""
    chance = random.Random(0)
    vocabulary = range(1000, 20000)
    points = []
    for n in tqdm(lengths, desc="curve"):
        times: dict[str, list[float]] = {"none": [], "radix": []}
        for name in ["none", "radix"] * repeats:
            prefix, rest = chance.choices(vocabulary, k=n), chance.choices(vocabulary, k=CURVE_TOKENS - n)
            use(llm, name)
            if n and name == "radix":
                ask(llm, [*prefix, 0])
            done = ask(llm, [*prefix, *rest])
            times[name].append(1e3 * done.first_token_s)
        points.append(
            {
                "shared_tokens": n,
                "reused_tokens": done.cached_tokens,
                "computed_tokens": done.prompt_tokens - done.cached_tokens,
                "none_ms": median(times["none"]),
                "radix_ms": median(times["radix"]),
            }
        )
    return points


def few_shot(llm: LLM, shuffled: bool) -> list[list[int]]:
    """The same examples before each question, in the same order or in a new one each time."""
    chance = random.Random(0)
    prompts = []
    for text in ASKED:
        examples = chance.sample(REVIEWS, len(REVIEWS)) if shuffled else REVIEWS
        shots = "".join(f"Review: {review}\nSentiment: {verdict}\n\n" for review, verdict in examples)
        prompts.append(llm.encode(f"{shots}Review: {text}\nSentiment:"))
    return prompts


def chats(llm: LLM, prefix_cache: str, answer_tokens: int) -> tuple[dict[str, Any], list[list[int]]]:
    """Conversations that take turns. Each turn sends the whole history, answers included, as a chat client does."""
    use(llm, prefix_cache)
    histories: list[list[dict[str, str]]] = [[] for _ in CHATS]
    done = []
    for turn in range(len(CHATS[0])):
        for history, chat in zip(histories, CHATS, strict=True):
            history.append({"role": "user", "content": chat[turn]})
            done.append(ask(llm, llm.encode(history), answer_tokens))
            history.append({"role": "assistant", "content": done[-1].text})
    return summary(done), [c.token_ids for c in done]


def workloads(llm: LLM, answer_tokens: int) -> dict[str, Any]:
    """Each kind of traffic with and without the tree."""
    data: dict[str, Any] = {}
    for name, prompts in [("few_shot", few_shot(llm, False)), ("few_shot_shuffled", few_shot(llm, True))]:
        data[name] = {kind: serve(llm, prompts, kind) for kind in ("none", "radix")}
    (without, expected), (radix, actual) = (chats(llm, kind, answer_tokens) for kind in ("none", "radix"))
    data["chats"] = {"none": without, "radix": radix, "same_answers": actual == expected}
    return data


def hit_rate(documents: list[int], pool_pages: int, policy: str) -> float:
    """Of the tokens of these documents, asked for one after another, the share that was found."""
    pages = PageAllocator(pool_pages + 1)
    cache = CacheManager(pages, PAGE_SIZE, RadixCache(pages, PAGE_SIZE, policy))
    found = total = 0
    for i, document in enumerate(documents):
        length = DOCUMENT_PAGES * PAGE_SIZE
        request = Request(i, [*range(document * length, (document + 1) * length), 0], SamplingParams())
        cache.attach(request)
        found, total = found + request.num_computed, total + length
        assert cache.grow(request, len(request.tokens))
        request.num_computed = len(request.tokens)
        cache.publish(request, request.num_computed)
        cache.detach(request)
    return found / total


def policies() -> dict[str, Any]:
    """Three patterns: a loop, a fixed popularity, and a popularity that moves on."""
    chance = random.Random(0)
    patterns = {
        "loop": [i % 10 for i in range(600)],
        "popular": [min(int(chance.paretovariate(0.8)), 40) for _ in range(600)],
        "drifting": [
            i // 100 * 100 + (chance.randrange(3) if chance.random() < 0.7 else 3 + chance.randrange(60))
            for i in range(600)
        ],
    }
    pools = [18, 26, 34, 42, 50, 58, 66, 74, 82, 90]
    return {
        name: {
            "requests": len(pattern),
            "documents": len(set(pattern)),
            "document_pages": DOCUMENT_PAGES,
            "pool_pages": pools,
            "hit_rate": {policy: [hit_rate(pattern, pool, policy) for pool in pools] for policy in POLICIES},
        }
        for name, pattern in patterns.items()
    }


def together(count: int = 8, prompt_tokens: int = 256) -> dict[str, Any]:
    """Equal prompts at once and one after another, with a scheduler and no model."""
    counts: dict[str, Any] = {"requests": count, "prompt_tokens": prompt_tokens}
    for name in ("at_once", "in_turn"):
        pages = PageAllocator(1000)
        tree = RadixCache(pages, PAGE_SIZE)
        scheduler = Scheduler(EngineConfig.chapter(4), CacheManager(pages, PAGE_SIZE, tree), 1000)
        requests = [Request(i, list(range(prompt_tokens)), SamplingParams(max_tokens=2)) for i in range(count)]
        computed = most_pages = 0
        for request in requests:
            scheduler.add(request)
            if name == "at_once" and request is not requests[-1]:
                continue
            while batch := scheduler.plan():
                computed += batch.total_tokens
                most_pages = max(most_pages, pages.capacity - pages.num_free)
                scheduler.retire(batch, [5] * len(batch.requests))
        counts[name] = {"tokens_computed": computed, "most_pages": most_pages, "tree_pages": tree.num_pages}
    return counts


def tree_cost(prompts: int = 200, prompt_tokens: int = 1000) -> dict[str, Any]:
    """Microseconds for a prompt of 1,000 tokens, half of it shared, in a tree of `prompts` others."""
    pages = PageAllocator(prompts * 64 + 64)
    tree = RadixCache(pages, PAGE_SIZE)
    whole = prompt_tokens // PAGE_SIZE
    tokens = [[*range(prompt_tokens // 2), *(i * 7 + j for j in range(prompt_tokens // 2))] for i in range(1, prompts)]
    for prompt in tokens:
        tree.insert(prompt[: whole * PAGE_SIZE], pages.alloc(whole))
    own, prompt = pages.alloc(whole), tokens[-1]
    runs = 200
    return {
        "prompt_tokens": prompt_tokens,
        "tree_pages": tree.num_pages,
        "match_us": 1e6 * timeit(lambda: tree.match_prefix(prompt), number=runs) / runs,
        "insert_us": 1e6 * timeit(lambda: tree.insert(prompt[: whole * PAGE_SIZE], own), number=runs) / runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=SHARED, help="of the curve (default: %(default)s)")
    parser.add_argument("--answer-tokens", type=int, default=24, help="of a chat's turn (default: %(default)s)")
    parser.add_argument("--name", default="ch04_reuse", help="of the result file (default: %(default)s)")
    args = parser.parse_args()

    llm = LLM(EngineConfig.chapter(4, model=args.model, device=args.device, page_size=PAGE_SIZE, kv_pages=KV_PAGES))
    ask(llm, llm.encode(QUESTIONS[0]))  # warm up
    data = {
        "model": args.model,
        "dtype": str(llm.model.dtype).removeprefix("torch."),
        "page_size": PAGE_SIZE,
        "shared": shared(llm, args.repeats),
        "curve_tokens": CURVE_TOKENS,
        "curve": curve(llm, args.lengths, args.repeats),
        "workloads": workloads(llm, args.answer_tokens),
        "policies": policies(),
        "together": together(),
        "tree": tree_cost(),
    }
    print(save(args.name, data, llm.device.type))


if __name__ == "__main__":
    main()
