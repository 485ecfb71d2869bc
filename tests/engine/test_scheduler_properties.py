"""The scheduler under random traffic, with a fake model that notices every wrong page table."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import accumulate
from random import Random

from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from minisgl.core import Batch, Request
from minisgl.scheduler.scheduler import Scheduler
from tests.engine.scenarios import FRESH, Scenario, expected, scenario, scenarios
from tests.helpers import check_pool, check_whole, fake_token, request, scheduler_with

BASES = [[(7 * i + 3 * j * j + 5) % 50 for j in range(40)] for i in range(2)]
PROMPTS = [[*base[:n], *tail] for base in BASES for n in (0, 1, 3, 8, 15, 16, 17, 33) for tail in ([9], [4, 4, 1])]
LONGEST = 24


def endless(prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + LONGEST:
        tokens.append(fake_token(tokens))
    return tokens[len(prompt) :]


ANSWERS = [endless(prompt) for prompt in PROMPTS]


LATE = -1  # K and V of a token that came too late


class FakePool:
    """Remembers for each slot which tokens, from the first on, its K and V were computed from.

    Page tables are kept by row and changed by `Batch.moved` alone, as the engine keeps them.
    """

    def __init__(self, max_rows: int, page_size: int) -> None:
        self.page_size = page_size
        self.slots: dict[int, int] = {}
        self.tables: list[list[int]] = [[] for _ in range(max_rows)]

    def plan(self, batch: Batch) -> list[list[int]]:
        """The slots of each request's tokens, by the page tables as they are when the batch is planned."""
        for r, first in batch.moved:
            if r.row >= 0:
                self.tables[r.row][first:] = r.pages[first:]
        slots = []
        for r, start, n in zip(batch.requests, batch.starts, batch.num_tokens, strict=True):
            whole = [page * self.page_size + i for page in self.tables[r.row] for i in range(self.page_size)]
            slots.append(whole[: start + n])
        return slots

    def forward(self, batch: Batch, slots: list[list[int]]) -> None:
        """Run a step, after all those planned before it have been retired."""
        contents = []
        for r, start, own in zip(batch.requests, batch.starts, slots, strict=True):
            known = r.tokens[: len(own)]
            assert len(known) == len(own) or r.finish_reason, f"request {r.id} computes a token that no step has chosen"
            late = [LATE] * (len(own) - len(known))  # of what was chosen after its end
            contents.append([*prefixes(known), *late])
            self.slots.update(zip(own[start:], contents[-1][start:], strict=True))
        for r, own, content in zip(batch.requests, slots, contents, strict=True):
            assert [self.slots.get(slot) for slot in own] == content, f"request {r.id} reads another's K and V"


def prefixes(tokens: list[int]) -> list[int]:
    """A number for each beginning of the sequence."""
    return list(accumulate(tokens, lambda seen, token: hash((seen, token))))


def run(case: Scenario) -> tuple[list[Request], list[Batch]]:
    """Serve a scenario, check after each step, and return all requests and steps."""
    config = case.config
    scheduler = scheduler_with(**case.switches, pages=case.pages, max_model_len=case.max_model_len)
    pool = FakePool(config.max_running_requests, config.page_size)
    requests = [
        request(
            i,
            PROMPTS[ask.prompt],
            () if ask.stop_after is None else (ANSWERS[ask.prompt][ask.stop_after],),
            max_tokens=ask.max_tokens,
            priority=ask.priority,
            cache_salt=ask.salt,
        )
        for i, ask in enumerate(case.asks)
    ]
    steps, flying = list[Batch](), deque[tuple[Batch, list[list[int]]]]()
    waiting = deque(sorted(requests, key=lambda r: case.asks[r.id].at))
    turn = idle = 0
    while waiting or scheduler.has_work or flying:
        while waiting and case.asks[waiting[0].id].at <= turn:
            scheduler.add(waiting.popleft())
        for at, i, in_flight in case.aborts:
            if at == turn and not in_flight:
                scheduler.abort(i)
        if len(flying) < case.depth and (batch := scheduler.plan()):
            check_batch(batch, scheduler.running, case)
            steps.append(batch)
            flying.append((batch, pool.plan(batch)))
            idle = 0
            check_flights(flying, scheduler)
            if len(flying) < case.depth:
                continue
        for at, i, in_flight in case.aborts:
            if at == turn and in_flight:
                scheduler.abort(i)
        if flying:
            batch, slots = flying.popleft()
            pool.forward(batch, slots)
            rows = zip(batch.requests, batch.starts, batch.num_tokens, strict=True)
            scheduler.retire(batch, [fake_token(r.tokens) if s + n == len(r.tokens) else 3 for r, s, n in rows])
            idle = 0
        check_pool(scheduler, requests)
        check_flights(flying, scheduler)
        turn, idle = turn + 1, idle + 1
        assert idle < 15, "requests wait, and nothing happens"
    check_whole(scheduler)
    check_answers(scheduler.max_len, requests, case)
    assert scheduler.work.preemptions == sum(r.preemptions for r in requests)
    return requests, steps


def check_batch(batch: Batch, running: list[Request], case: Scenario) -> None:
    config = case.config
    assert len(set(batch.requests)) == len(batch.requests) <= config.max_running_requests
    assert all(n > 0 for n in batch.num_tokens)
    assert all(r.finish_reason is None for r in batch.requests)
    if config.batching != "static" and (config.chunked_prefill or len(batch.requests) > 1):
        assert batch.total_tokens <= config.max_batch_tokens
    assert all(len(r.pages) * config.page_size >= r.num_computed for r in running)


def check_flights(flying: Iterable[tuple[Batch, list[list[int]]]], scheduler: Scheduler) -> None:
    """What a planned step reads or writes is not free, and not written by the step of another request."""
    size, free = scheduler.cache.page_size, set(scheduler.cache.pages._free)
    for batch, slots in flying:
        owners = dict[int, Request]()
        for (r, start, _), own in zip(batch, slots, strict=True):
            assert free.isdisjoint(slot // size for slot in own), f"request {r.id} is in flight on a free page"
            assert all(owners.setdefault(slot, r) is r for slot in own[start:]), "two requests write to one slot"


def check_answers(max_len: int, requests: list[Request], case: Scenario) -> None:
    for r, ask in zip(requests, case.asks, strict=True):
        want = expected(PROMPTS[ask.prompt], ANSWERS[ask.prompt], ask.max_tokens, r.stop_ids, max_len)
        if want is None:
            assert (r.finish_reason, r.output) == ("error", [])
            assert r.error
        elif r.finish_reason == "abort":
            assert r.id in {i for _, i, _ in case.aborts}
            assert r.output == want[: len(r.output)]
        else:
            assert r.output == want
            assert r.finish_reason == ("stop" if want[-1] in r.stop_ids else "length")


@settings(
    max_examples=scenarios(1500),
    derandomize=not FRESH,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.randoms(use_true_random=False))
def test_any_traffic_gets_its_tokens_and_gives_all_pages_back(r: Random):
    case = scenario(r, len(PROMPTS), LONGEST, depths=(1, 1, 2, 3))
    note(f"{case}")
    run(case)
