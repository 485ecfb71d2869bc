"""A scheduler with a fake model: ints in, ints out, milliseconds. Pages hold 4 tokens unless a test says otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minisgl.config import EngineConfig
from minisgl.core import Batch, Request, SamplingParams
from minisgl.kvcache.cache_manager import CacheManager
from minisgl.kvcache.pages import PageAllocator
from minisgl.kvcache.radix_cache import PREFIX_CACHES
from minisgl.scheduler.scheduler import Scheduler

EOS = 3
Row = tuple[int, int, int]  # request id, position of the first token computed, number of tokens


def new_scheduler(pages: int = 64, **switches) -> Scheduler:
    """A scheduler over a pool of this many pages. Nothing is set aside for answers, nothing is shared."""
    config = EngineConfig(**({"page_size": 4, "prefix_cache": "none", "output_reserve": 0.0} | switches))
    allocator = PageAllocator(pages + 1)  # page 0 is the dummy
    prefix = PREFIX_CACHES[config.prefix_cache](allocator, config.page_size, config.eviction)
    cache = CacheManager(allocator, config.page_size, prefix)
    return Scheduler(config, cache, max_len=pages * config.page_size + 1)


def new_request(id: int, prompt: int | list[int], max_tokens: int = 8, answer: int = 0, **params) -> Request:
    """A request with a prompt of this many tokens that nobody else has, and `answer` tokens generated already."""
    tokens = [1000 * (id + 1) + i for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
    request = Request(id, tokens, SamplingParams(max_tokens=max_tokens, **params), frozenset({EOS}))
    request.tokens += [500 + i for i in range(answer)]
    return request


def run_it(scheduler: Scheduler, request: Request, computed: int, tokens_of_pages: int | None = None) -> Request:
    """Put a request among the running ones as if earlier steps had computed its first tokens.

    It gets pages for `tokens_of_pages` tokens, or for all that it knows.
    """
    scheduler.add(request)
    scheduler.cache.attach(request)
    assert scheduler.cache.grow(request, tokens_of_pages or len(request.tokens))
    scheduler._start(request)
    request.num_computed = computed
    return request


def rows(batch: Batch | None) -> list[Row]:
    """What a step computes, in the batch's order."""
    if batch is None:
        return []
    return [(r.id, start, n) for r, start, n in zip(batch.requests, batch.starts, batch.num_tokens, strict=True)]


def ids(requests: Sequence[Request]) -> list[int]:
    return [request.id for request in requests]


def next_token(tokens: Sequence[int]) -> int:
    """The fake model: what follows depends on all tokens, so one that is lost or doubled shows. Sometimes it is EOS."""
    return sum((i + 1) * token for i, token in enumerate(tokens)) % 53


def forward(batch: Batch) -> list[int]:
    """Run the fake model over a step. Where the step ends before the last known token, its entry means nothing."""
    spans = zip(batch.requests, batch.starts, batch.num_tokens, strict=True)
    return [next_token(r.tokens) if start + n == len(r.tokens) else 77 for r, start, n in spans]


def alone(request: Request, max_len: int) -> list[int]:
    """The tokens that a request must end with, whoever runs beside it."""
    tokens = list(request.tokens)
    while len(tokens) < min(request.max_len, max_len):
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS:
            break
    return tokens


def drive(
    scheduler: Scheduler,
    arrivals: Sequence[tuple[int, Request]],
    after_plan: Callable[[int, Batch], None] = lambda step, batch: None,
    most_steps: int = 3000,
) -> list[list[Row]]:
    """Run until nobody is left; requests come before the step they name. Returns each step's rows."""
    waiting, steps = list(arrivals), list[list[Row]]()
    while waiting or scheduler.has_work:
        assert len(steps) < most_steps, (
            f"after {most_steps} steps requests {ids(scheduler.running)} run and {ids(scheduler.waiting)} wait, with "
            f"{scheduler.cache.num_available} pages to be had: it will never end"
        )
        while waiting and waiting[0][0] <= len(steps):
            scheduler.add(waiting.pop(0)[1])
        batch = scheduler.plan()
        if batch:
            after_plan(len(steps), batch)
            scheduler.retire(batch, forward(batch))
        check_pages(scheduler, [request for _, request in arrivals])
        steps.append(rows(batch))
    return steps


def check_pages(scheduler: Scheduler, requests: Sequence[Request]) -> None:
    """Each page has as many holders as requests and tree hold it; all others are free."""
    allocator = scheduler.cache.pages
    expected = [0] * (allocator.capacity + 1)
    nodes = [scheduler.cache.prefix.root]
    for node in nodes:  # grows while it is walked
        nodes += node.children.values()
    for holder in [*requests, *nodes]:
        for page in holder.pages:
            expected[page] += 1
    for page in range(1, allocator.capacity + 1):
        actual = allocator.holders(page)
        assert actual == expected[page], f"page {page} counts {actual} holders, but {expected[page]} have it"
    assert allocator.num_free == sum(n == 0 for n in expected[1:])
