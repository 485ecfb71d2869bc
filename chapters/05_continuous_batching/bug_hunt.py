"""A scheduler that never preempts: it admits a request only when room for its whole answer is left. It has one bug.

It ran for weeks with pages of one token. With larger pages it answers for a while, then stops for ever, though most of
the pool is free. Run `pytest tests/ch05_continuous_batching/test_bug_hunt.py --runxfail` to see the symptom.
"""

from __future__ import annotations

from minisgl.core import Batch, Request
from minisgl.scheduler.scheduler import Scheduler


class PromisingScheduler(Scheduler):
    """Whoever runs was promised all it may need, so pages never run out in the middle of an answer."""

    def _admit(self, batch: Batch) -> None:
        promised = sum(self._still_to_come(request) for request in self.running)
        for request in list(self.waiting):
            if self._budget <= 0 or not self._free_rows:
                return
            self.cache.attach(request)
            if promised + self._still_to_come(request) > self.cache.num_available:
                self.cache.detach(request)  # the room that it needs will be there when others have finished
                return
            num_tokens = min(len(request.tokens) - request.num_computed, self._budget)
            self.cache.grow(request, request.num_computed + num_tokens)
            self._start(request)
            batch.moved.append((request, 0))
            self._continue(batch, [request])
            promised += self._still_to_come(request)

    def _still_to_come(self, request: Request) -> int:
        """What a request may take beyond what it has, its whole answer included."""
        longest = request.max_len - 1  # the last token is never fed back
        return longest - len(request.pages) * self.cache.page_size
