"""Who is next: the order among requests, which waiting ones are tried first, and how far one may go."""

from collections.abc import Callable

from minisgl.core import Request
from minisgl.kvcache.cache_manager import CacheManager

WINDOW = 128  # waiting requests compared in a step: matching them all against the tree would cost more than it gains


def precedence(request: Request) -> tuple[int, int]:
    """Sorts by priority, then by arrival. A preempted request keeps its place."""
    return -request.params.priority, request.id


def seen(request: Request) -> int:
    """Tokens that may have gone through the model after the next step: those that the host has seen."""
    return len(request.tokens)


def coming(request: Request) -> int:
    """The same, with the token that a step in flight will bring. The last token of an answer is never fed back."""
    tokens = len(request.tokens)
    if tokens <= request.num_computed:
        tokens = request.num_computed + 1
    return tokens if tokens < request.max_len else request.max_len - 1


def fcfs(waiting: list[Request], cache: CacheManager, limit: int) -> list[Request]:
    """First come, first served."""
    return waiting[:limit]


def lpm(waiting: list[Request], cache: CacheManager, limit: int) -> list[Request]:
    """Longest prefix match: who has most in the prefix cache goes first, before it is evicted (SGLang).

    A request that shares nothing may wait long behind a stream of others that do.
    """

    def key(request: Request) -> tuple[int, int, int]:
        _, cached = cache.prefix.match_prefix(request.tokens, request.params.cache_salt)
        return -request.params.priority, -len(cached), request.id

    return sorted(waiting[: max(WINDOW, limit)], key=key)[:limit]


ORDERS: dict[str, Callable[[list[Request], CacheManager, int], list[Request]]] = {"fcfs": fcfs, "lpm": lpm}
