"""Decides what each step computes: one token budget, shared by everybody.

A plain state machine over lists and ints. `plan` makes a batch, somebody runs it, `retire` takes in its tokens.
Ideas: iteration-level scheduling (Orca, Yu et al., 2022), chunked prefill beside decodes (Sarathi-Serve, Agrawal et
al., 2024), preemption by recomputation (vLLM, Kwon et al., 2023), longest prefix first (SGLang, Zheng et al., 2024).
"""

from bisect import insort
from collections.abc import Sequence
from math import ceil

from minisgl.config import BATCH_TOKENS, EngineConfig
from minisgl.core import Batch, FinishReason, Request, WorkCounts
from minisgl.kvcache.cache_manager import CacheManager
from minisgl.scheduler.policy import ORDERS, coming, precedence, seen


class Scheduler:
    """Requests wait, run and finish; each step is made of what fits the budget and the pool.

    Args:
        config: the switches; batching, chunked_prefill, policy and the limits are read here.
        cache: who owns the pages.
        max_len: the longest sequence, in tokens, that context and pool allow.
        work: where reuse and preemptions are counted.
    """

    def __init__(self, config: EngineConfig, cache: CacheManager, max_len: int, work: WorkCounts | None = None) -> None:
        self.config, self.cache, self.max_len = config, cache, max_len
        self.work = work or WorkCounts()
        self.waiting: list[Request] = []  # by precedence
        self.running: list[Request] = []  # by precedence, so that the last one is the first to be preempted
        self.finished: list[Request] = []  # since somebody last looked: the engine empties it
        self._requests: dict[int, Request] = {}  # all that are not finished
        self.in_flight: list[Batch] = []  # planned, not retired
        self._moved: list[tuple[Request, int]] = []  # by publish, since the last plan
        self._free_rows = list(range(config.max_running_requests - 1, -1, -1))
        self._compose = {"static": self._static, "prefill_first": self._prefill_first, "mixed": self._mixed}[
            config.batching
        ]
        self._order = ORDERS[config.policy]
        self._ready = coming if config.overlap == "on" else seen
        self._budget = 0

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request, refusal: str = "") -> None:
        """Queue a request. One that could never run, or was refused before, is finished at once with the reason."""
        self._requests[request.id] = request
        if request.prompt_len >= self.max_len:
            refusal = refusal or (
                f"the prompt has {request.prompt_len:,} tokens, but a sequence may have at most {self.max_len:,} here, "
                "answer included: shorten the prompt, or see --max-model-len and --kv-pages"
            )
        if refusal:
            request.error = refusal
            self._finish(request, "error")
            return
        request.max_len = min(request.max_len, self.max_len)
        insort(self.waiting, request, key=precedence)

    def abort(self, request_id: int, reason: FinishReason = "abort") -> None:
        """End a request at any moment; unknown and finished ones are ignored.

        One that is in a planned step keeps its pages until that step is retired, and its token is dropped there.
        """
        request = self._requests.get(request_id)
        if request is None or request.finish_reason is not None:
            return
        if request.row < 0:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
        self._finish(request, reason)

    def plan(self) -> Batch | None:
        """Choose the next step: running requests first, then waiting ones, within the budget. None if nobody is there.

        Every request in the batch has pages for the tokens it computes. Several steps may be planned before the first
        is retired; with overlap, a token that a step in flight will bring counts as known.
        """
        batch = Batch(moved=self._moved)
        self._budget = self.config.max_batch_tokens or BATCH_TOKENS
        self._compose(batch)
        if not batch.requests:
            return None
        self._moved = []
        self.in_flight.append(batch)
        return batch

    def retire(self, batch: Batch, tokens: Sequence[int]) -> list[Request]:
        """Take in the results of a step.

        Args:
            batch: what was planned.
            tokens: one for each request of the batch. Where the step did not reach the last known token (an unfinished
                chunk) or the request has ended meanwhile, its entry means nothing; -1 says that there was no valid one.

        Returns:
            The requests that got a token.
        """
        self._hold_for_later_steps(batch)
        grown = []
        for request, start, num_tokens, token in zip(
            batch.requests, batch.starts, batch.num_tokens, tokens, strict=True
        ):
            request.in_flight -= 1
            if request.finish_reason is not None:  # ended while the step ran: its token comes too late
                if request.in_flight == 0:
                    self._let_go(request)
                continue
            if num_tokens > 1 and self.cache.publish(request, start + num_tokens):
                self._moved.append((request, 0))
            known = request.tokens
            if start + num_tokens < len(known):
                continue
            if token < 0:
                request.error = "the model's logits hold NaN: check the weights and the dtype"
                self._finish(request, "error")
                continue
            known.append(token)
            grown.append(request)
            if token in request.stop_ids:
                self._finish(request, "stop")
            elif len(known) >= request.max_len:
                self._finish(request, "length")
        if self.finished:
            self.running = [request for request in self.running if request.finish_reason is None]
        return grown

    def _hold_for_later_steps(self, batch: Batch) -> None:
        """Pages that a request may swap when this step is published stay held for the steps planned after it."""
        self.in_flight.remove(batch)
        self.cache.pages.release(batch.held)
        if batch.total_tokens == len(batch.requests):
            return  # nothing is published
        for request, _, num_tokens in batch:
            if num_tokens > 1 and request.in_flight > 1:
                self.cache.pages.hold(request.pages)
                last = next(later for later in reversed(self.in_flight) if request in later.requests)
                last.held += request.pages

    def undo(self, batch: Batch) -> None:
        """Take back the last planned step, which was not run to its end: its tokens are not computed."""
        self.in_flight.remove(batch)
        self.cache.pages.release(batch.held)
        self._moved = batch.moved + self._moved
        for request, start in zip(batch.requests, batch.starts, strict=True):
            request.num_computed = start
            request.in_flight -= 1
            if request.finish_reason is not None and request.in_flight == 0:
                self._let_go(request)

    # How a step is put together, by config.batching.

    def _mixed(self, batch: Batch) -> None:
        """Decodes and chunks side by side: running requests first, then new ones with what is left of the budget."""
        self._continue(batch, self.running)
        self._admit(batch)

    def _prefill_first(self, batch: Batch) -> None:
        """A step is all prefill or all decode, and prefill goes first."""
        self._continue(batch, [request for request in self.running if len(request.tokens) - request.num_computed > 1])
        self._admit(batch)
        if not batch.requests:
            self._continue(batch, self.running)

    def _static(self, batch: Batch) -> None:
        """A group of requests runs until the last of them has finished; only then the next group is formed."""
        self._budget = self.max_len * self.config.max_running_requests  # the whole group's prompts at once
        if self.running:
            self._continue(batch, self.running)
        else:
            self._admit(batch)

    def _continue(self, batch: Batch, requests: list[Request]) -> None:
        """Schedule the next tokens of running requests, preempting from the end of the line where the pool is full."""
        page_size, budget = self.cache.page_size, self._budget
        for request in requests:  # preemption takes whom this loop has not reached, or the request itself
            start = request.num_computed
            num_tokens = self._ready(request) - start
            if num_tokens > budget:
                num_tokens = budget
            if num_tokens <= 0 or request.row < 0:
                continue
            end = start + num_tokens
            if end > len(request.pages) * page_size and not self._grow(batch, request, end):
                continue
            batch.requests.append(request)
            batch.starts.append(start)
            batch.num_tokens.append(num_tokens)
            request.num_computed = end
            request.in_flight += 1
            budget -= num_tokens
        self._budget = budget

    def _grow(self, batch: Batch, request: Request, num_tokens: int) -> bool:
        """Get pages for a running request; False if it had to give up its own, or must wait for a step in flight."""
        held = len(request.pages)
        while not self.cache.grow(request, num_tokens):
            if self.running[-1].in_flight:  # its step still uses its pages
                return False
            victim = self.running.pop()
            self._preempt(victim)
            if victim is request:
                return False
        batch.moved.append((request, held))
        return True

    def _preempt(self, victim: Request) -> None:
        """Take a request's pages; it waits in its old place and computes its tokens, answer included, once more."""
        self._let_go(victim)
        victim.preemptions += 1
        self.work.preemptions += 1
        insort(self.waiting, victim, key=precedence)

    def _admit(self, batch: Batch) -> None:
        """Let waiting requests run, in the policy's order, until one does not fit: nobody overtakes it."""
        if not self.waiting or not self._free_rows:
            return
        to_come = sum(self._pages_to_come(request) for request in self.running)
        for request in self._order(self.waiting, self.cache, len(self._free_rows)):
            if self._budget <= 0 or not self._free_rows:
                return
            self.cache.attach(request)
            num_tokens = len(request.tokens) - request.num_computed
            if self.config.chunked_prefill:
                num_tokens = min(num_tokens, self._budget)
            # Whoever is alone may go beyond the budget (without chunks) and beyond the forecast: waiting gains nothing.
            in_budget = num_tokens <= self._budget or not batch.requests
            in_pool = to_come + self._pages_to_come(request) <= self.cache.num_available or not self.running
            if not (in_budget and in_pool and self.cache.grow(request, request.num_computed + num_tokens)):
                self.cache.detach(request)
                return
            self._start(request)
            self._budget = max(self._budget, num_tokens)
            batch.moved.append((request, 0))
            self._continue(batch, [request])
            to_come += self._pages_to_come(request)

    def _pages_to_come(self, request: Request) -> int:
        """Pages that a request is expected to take beyond those it has: its known tokens, and part of the rest."""
        known = len(request.tokens)
        expected = known + ceil(self.config.output_reserve * (request.max_len - 1 - known))
        return self.cache.pages_for(expected) - len(request.pages)

    def _start(self, request: Request) -> None:
        self.waiting.remove(request)
        insort(self.running, request, key=precedence)
        request.row = self._free_rows.pop()
        self.work.tokens_reused += request.num_computed
        if not request.preemptions:
            request.num_cached = request.num_computed

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """Record the end. Pages go back now, or with the step that may still read them."""
        request.finish_reason = reason
        self.finished.append(request)
        del self._requests[request.id]
        if request.row >= 0 and request.in_flight == 0:
            self._let_go(request)

    def _let_go(self, request: Request) -> None:
        """Leave what was computed to the prefix cache, and give back pages and row."""
        self.cache.publish(request, min(request.num_computed, len(request.tokens)))  # late tokens are nobody's prefix
        self.cache.detach(request)
        self._free_rows.append(request.row)
        request.row = -1
