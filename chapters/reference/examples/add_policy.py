"""Policies of your own: which prefix is evicted first, and which waiting request is admitted first.

    python chapters/reference/examples/add_policy.py

A chat with a long system prompt stands against a flood of prompts that nobody will ask again. The flood is larger than
the pool, so the least recently used prefix is the system prompt.
"""

from __future__ import annotations

from random import Random

from minisgl import LLM, EngineConfig, SamplingParams
from minisgl.core import Request
from minisgl.kvcache.cache_manager import CacheManager
from minisgl.kvcache.radix_cache import POLICIES, Node
from minisgl.scheduler.policy import ORDERS

POOL = {"page_size": 16, "kv_pages": 18, "max_running_requests": 1}  # 17 pages and the dummy: 272 tokens


def found_before(node: Node) -> tuple[int, ...]:
    """First what was never found since it was computed, then the rest; the least recently used first in both.

    Idea: segmented LRU (Karedla et al., 1994). None of the numbers can fall while the node waits.
    """
    return node.hits > 0, node.last_used


def shortest(waiting: list[Request], cache: CacheManager, limit: int) -> list[Request]:
    """Fewest tokens first, within a priority. A long prompt may wait for ever behind a stream of short ones."""
    return sorted(waiting, key=lambda r: (-r.params.priority, len(r.tokens), r.id))[:limit]


def register() -> None:
    """Let `eviction="found_before"` and `policy="shortest"` choose these."""
    POLICIES["found_before"] = found_before
    ORDERS["shortest"] = shortest


def workload(rounds: int = 4) -> list[list[int]]:
    """Token ids: two chats with the same 64 tokens at the start, then rounds of four single prompts and a chat."""
    random = Random(0)

    def some(count: int) -> list[int]:
        return [random.randrange(10, 120) for _ in range(count)]

    system = some(64)
    prompts = [system + some(8), system + some(8)]
    for _ in range(rounds):
        prompts += [*(some(70) for _ in range(4)), system + some(8)]
    return prompts


if __name__ == "__main__":
    register()
    for eviction in ("lru", "lfu", "fifo", "found_before"):
        with LLM(EngineConfig(eviction=eviction, **POOL)) as llm:
            llm.generate(workload(), SamplingParams(max_tokens=1, detokenize=False), progress=False)
            print(f"{eviction:12} {llm.work.tokens_reused} tokens reused, {llm.work.tokens_computed} computed")
