"""Ranks that plan each for itself, so that no plan is sent. It has one bug: find it.

Whoever is alone is answered as by one process. Of several requests that come together, some get nonsense.
Run `pytest tests/ch09_tensor_parallel/test_bug_hunt.py --runxfail` to see the symptom, and again to see it gone.
"""

from __future__ import annotations

from minisgl.core import Request, SamplingParams
from minisgl.engine.engine import Engine


class SelfPlanning:
    """One rank's engine. All ranks are told the same, in the same order, and none is told what another has planned.

    The same requests and the same scheduler make the same plan, and the same logits and seeds the same tokens. So each
    rank knows the other ranks' next step, and what to send it for is saved.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.asked: dict[str, tuple[list[int], SamplingParams]] = {}  # by the names that the server gave them
        self.begun: dict[str, Request] = {}

    def ask(self, name: str, prompt: list[int], params: SamplingParams) -> None:
        """Between two steps: a new prompt. It begins with the next one."""
        self.asked[name] = prompt, params

    def withdraw(self, name: str) -> None:
        """Between two steps: nobody waits for this answer any more."""
        if name in self.begun:
            self.engine.abort(self.begun[name].id)
        else:
            self.asked.pop(name, None)

    def step(self) -> None:
        """A step of this rank; in its collectives it meets the others."""
        for name in self.asked.keys() - self.begun.keys():
            prompt, params = self.asked[name]
            self.begun[name] = Request(len(self.begun), list(prompt), params)
            self.engine.add(self.begun[name])
        self.engine.step()
