"""Task 08.7: tokens travel to the host behind their step, and whoever wants them waits for that and no more."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch

from tests.ch08_cuda_graphs.scene import DEVICE, new_runner
from tests.helpers import tiny_model


class LateCopies:
    """Events of a GPU that is far behind: what was copied here before `record` arrives when somebody synchronizes."""

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self.buffers, self.log = buffers, list[str]()

    def event(self, i: int) -> LateEvent:
        return LateEvent(self, i)


class LateEvent:
    def __init__(self, copies: LateCopies, i: int) -> None:
        self.copies, self.i, self.on_its_way = copies, i, None

    def record(self) -> None:
        self.copies.log.append(f"record {self.i}")
        self.on_its_way = self.copies.buffers[self.i].clone()
        self.copies.buffers[self.i].fill_(-77)  # what an unfinished copy leaves there: anything

    def synchronize(self) -> None:
        self.copies.log.append(f"wait {self.i}")
        if self.on_its_way is not None:
            self.copies.buffers[self.i].copy_(self.on_its_way)
            self.on_its_way = None


@pytest.fixture(scope="module")
def model():
    return tiny_model().to(DEVICE)


@pytest.fixture
def runner(model):
    return new_runner(model)


@pytest.fixture
def late(runner):
    """The runner's two buffers, with copies that arrive late."""
    copies = LateCopies([torch.full((6,), -77) for _ in range(2)])
    runner._read = cycle(copies.buffers)
    runner._events = cycle([copies.event(i) for i in range(2)])
    return copies


def tokens(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, device=DEVICE)


def test_tokens_arrive_as_they_are(runner):
    assert runner._fetch(tokens(5, 6, 7))() == [5, 6, 7]


def test_tokens_of_a_step_are_those_of_its_time(runner):
    """The next replay writes to the same memory."""
    chosen = tokens(5, 6, 7)
    wait = runner._fetch(chosen)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    chosen.fill_(9)
    assert wait() == [5, 6, 7]


def test_two_steps_may_be_under_way(runner):
    first, second = runner._fetch(tokens(1, 2, 3)), runner._fetch(tokens(4, 5))
    assert (first(), second()) == ([1, 2, 3], [4, 5]), "take a buffer for each step: next(self._read)"


def test_the_third_step_uses_the_memory_of_the_first_again(runner):
    for ids in ([1, 2], [3, 4], [5, 6], [7, 8]):
        assert runner._fetch(tokens(*ids))() == ids


def test_nobody_waits_when_a_step_is_launched(runner, late):
    runner._fetch(tokens(5, 6))
    assert late.log == ["record 0"], "record the event behind the copy, and wait for nothing yet"


def test_tokens_are_read_after_their_event(runner, late):
    wait = runner._fetch(tokens(5, 6))
    assert wait() == [5, 6], "the copy had not arrived when the tokens were read"
    assert late.log == ["record 0", "wait 0"]


def test_each_step_has_an_event_of_its_own(runner, late):
    first, second = runner._fetch(tokens(1, 2)), runner._fetch(tokens(3, 4))

    assert (first(), second()) == ([1, 2], [3, 4])
    assert late.log == ["record 0", "record 1", "wait 0", "wait 1"]


def test_the_copy_is_only_asked_for(runner, monkeypatch):
    asked, copy = [], torch.Tensor.copy_
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda to, source, non_blocking=False: asked.append(non_blocking) or copy(to, source)
    )
    runner._fetch(torch.tensor([4, 5], device=DEVICE))

    assert asked == [True], "without non_blocking the host waits for the step"
