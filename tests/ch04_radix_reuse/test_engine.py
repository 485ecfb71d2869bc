"""All tasks together: the engine with the tree gives chapter 1's tokens, computes less, and its pool stays whole."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import count

import pytest
import torch

from minisgl.config import EngineConfig
from minisgl.core import Request, SamplingParams
from minisgl.engine.engine import Engine
from minisgl.simple import naive_generate
from tests.helpers import tiny_model

MODEL = tiny_model()
SYSTEM = [(i * 37 + 11) % 120 + 8 for i in range(21)]
PROMPTS = [
    [*SYSTEM, 20, 30, 40],
    [*SYSTEM, 20, 30, 41],
    [*SYSTEM, 50],
    [*SYSTEM[:13], 60, 61, 62, 63],
    [70, 71, 72],
    [*SYSTEM, 20, 30, 40],
]
NEW_TOKENS = 11


@cache
def oracle(prompt: tuple[int, ...], new_tokens: int = NEW_TOKENS) -> list[int]:
    return list(naive_generate(MODEL, list(prompt), SamplingParams(max_tokens=new_tokens, ignore_eos=True)))


class Server:
    """Chapter 4's engine on the tiny model. A page that nobody holds is filled with NaN after every step."""

    def __init__(self, **overrides) -> None:
        self.engine = Engine(MODEL, EngineConfig.chapter(4, **{"page_size": 4, "kv_pages": 64} | overrides))
        self.engine.pool.kv[:, :, 1:] = float("nan")
        self._ids = count()

    def serve(self, prompts: list[list[int]], new_tokens: int = NEW_TOKENS, **params) -> list[Request]:
        """All these prompts at once, to their end."""
        requests = [
            Request(next(self._ids), list(p), SamplingParams(max_tokens=new_tokens, ignore_eos=True, **params))
            for p in prompts
        ]
        for request in requests:
            self.engine.add(request)
        while self.engine.has_work:
            self.engine.step()
            self._check()
        for request in requests:
            expected = oracle(tuple(request.tokens[: request.prompt_len]), new_tokens)
            assert request.output == expected, (
                f"request {request.id}: {request.output} in place of {expected}; a page was read that was not its own, "
                "not computed yet or given back"
            )
        return requests

    def _check(self) -> None:
        """Every page has exactly its holders, and the free ones are poisoned."""
        held = Counter(page for request in self.engine.scheduler.running for page in request.pages)
        nodes = [self.engine.prefix.root]
        for node in nodes:
            nodes += node.children.values()
            held.update(node.pages)
        pages = self.engine.pages
        for page in range(1, pages.capacity + 1):
            assert pages.holders(page) == held[page], f"page {page} has {pages.holders(page)} holders, not {held[page]}"
        free = [page for page in range(1, pages.capacity + 1) if not held[page]]
        self.engine.pool.kv[:, :, torch.tensor(free, dtype=torch.int64)] = float("nan")


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("eviction", ["lru", "lfu", "fifo"])
def test_tokens_are_those_of_chapter_1(page_size, eviction):
    server = Server(page_size=page_size, kv_pages=1 + 300 // page_size, eviction=eviction)
    server.serve(PROMPTS)
    server.serve(PROMPTS)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_second_request_computes_its_prompt_without_the_shared_pages(page_size):
    server = Server(page_size=page_size, kv_pages=1 + 300 // page_size)
    work = server.engine.work
    server.serve(PROMPTS[:1], new_tokens=1)
    assert work.tokens_computed == len(PROMPTS[0])

    [second] = server.serve(PROMPTS[1:2], new_tokens=1)

    shared = 23 // page_size * page_size  # the prompts differ in their last token
    assert second.num_cached == work.tokens_reused == shared
    assert work.tokens_computed == len(PROMPTS[0]) + len(PROMPTS[1]) - shared


def test_a_prompt_of_whole_pages_that_is_cached_whole_still_computes_its_last_page():
    server = Server(page_size=4)
    prompt = SYSTEM[:16]
    server.serve([prompt], new_tokens=1)
    [again] = server.serve([prompt], new_tokens=1)
    assert again.num_cached == 12, "three pages of four: the last token must be computed, and its page with it"


def test_the_next_turn_of_a_conversation_finds_its_own_answer():
    server = Server(page_size=4)
    [turn] = server.serve([SYSTEM], new_tokens=12)
    history = turn.tokens  # 21 + 12 tokens; the last one was never fed
    [turn] = server.serve([[*history, 90, 91, 92]])
    assert turn.num_cached == 32, "the prompt and the answer, in whole pages"


def test_equal_prompts_in_one_step_are_all_computed_and_kept_once():
    server = Server(page_size=4)
    requests = server.serve([SYSTEM] * 3, new_tokens=2)
    assert [request.num_cached for request in requests] == [0, 0, 0], "none of them is computed when all are planned"
    assert server.engine.work.tokens_computed == 3 * (len(SYSTEM) + 1)
    assert server.engine.prefix.num_pages == 5, "but the tree keeps one copy of the 5 whole pages"


def test_another_salt_shares_nothing():
    server = Server()
    server.serve([SYSTEM], cache_salt="alice")
    [other] = server.serve([SYSTEM], cache_salt="bob")
    assert other.num_cached == 0


@pytest.mark.parametrize("eviction", ["lru", "lfu", "fifo"])
@pytest.mark.parametrize("batching", ["static", "mixed"])
def test_a_pool_that_is_too_small_for_the_tree_evicts_and_preempts_and_gives_the_same_tokens(eviction, batching):
    server = Server(page_size=4, kv_pages=14, eviction=eviction, batching=batching, output_reserve=0.0)
    for _ in range(2):
        server.serve(PROMPTS)
    engine = server.engine
    assert engine.work.preemptions > 0, "the pool is small enough for this test to mean something"
    assert engine.pages.num_free + engine.prefix.num_pages == engine.pages.capacity
    assert engine.prefix.num_evictable == engine.prefix.num_pages, "with nobody running, all of it can go"


def test_chunks_that_end_inside_a_page_are_found_only_up_to_the_page_before():
    server = Server(page_size=4, batching="mixed", max_batch_tokens=6)
    server.serve(PROMPTS)
    server.serve(PROMPTS)


def test_without_the_tree_nothing_is_reused():
    server = Server(prefix_cache="none")
    server.serve(PROMPTS)
    server.serve(PROMPTS)
    assert server.engine.work.tokens_reused == 0
    assert server.engine.pages.num_free == server.engine.pages.capacity
