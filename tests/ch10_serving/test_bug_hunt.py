"""The bug hunt of chapter 10. Strict xfail keeps the bug in the repository; --runxfail shows it to whoever hunts it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import ModuleType

import pytest

from minisgl.core import SamplingParams
from minisgl.message import messages as m
from tests.ch10_serving.engine import MODEL, new_server
from tests.ch10_serving.scene import run, settled

CHAPTER = Path(__file__).parents[2] / "chapters" / "10_serving"
SOURCE = (CHAPTER / "bug_hunt.py").read_text()
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


class Service:
    """A desk, an engine, and a tokenizer that takes as long as it is let."""

    def __init__(self, source: str) -> None:
        module = ModuleType("bug_hunt")
        exec(source, module.__dict__)
        self.server, self.tokenizing = new_server(), asyncio.Semaphore(0)
        self.desk = module.Desk(self.tokenize, self.server._take)

    async def tokenize(self, text: str) -> list[int]:
        await self.tokenizing.acquire()
        return [5 + ord(letter) % MODEL.config.vocab_size % 100 for letter in text]

    async def ask(self, text: str) -> asyncio.Task:
        task = asyncio.ensure_future(self.desk.ask(text, PARAMS))
        await settled()
        return task

    async def step(self) -> None:
        """A step, if there is work; its message reaches the desk."""
        if self.server.engine.has_work:
            self.server._tell(self.server.engine.step())
            done = self.server.front.sent.pop()
            assert isinstance(done, m.StepDone)
            for output in done.outputs:
                self.desk.receive(output)
        await settled()

    async def let_tokenize(self) -> None:
        self.tokenizing.release()
        await settled()


async def after_hanging_up(source: str, tokenized_before: bool) -> tuple[int, bool]:
    """Steps for a client that hangs up, after it has gone; and whether the desk remembers it."""
    service = Service(source)
    task = await service.ask("hello")
    if tokenized_before:
        await service.let_tokenize()
        await service.step()
    task.cancel()
    await settled()
    if not tokenized_before:
        await service.let_tokenize()
    steps = 0
    while service.server.engine.has_work:
        await service.step()
        steps += 1
    return steps, bool(service.desk.open or service.desk.received)


def test_everybody_is_answered():
    async def main():
        service = Service(SOURCE)
        tasks = [await service.ask(text) for text in ("one", "two", "three")]
        for _ in tasks:
            await service.let_tokenize()
        while not all(task.done() for task in tasks):
            await service.step()
        assert [len(task.result()) for task in tasks] == [PARAMS.max_tokens] * 3

    run(main())


def test_who_hangs_up_while_the_answer_is_written_costs_no_more_than_a_step():
    assert run(after_hanging_up(SOURCE, tokenized_before=True)) == (1, False)


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="the bug hunt of chapter 10: run with --runxfail")
def test_who_hangs_up_while_the_prompt_is_tokenized_costs_none():
    assert run(after_hanging_up(SOURCE, tokenized_before=False)) == (0, False)


def test_the_fix_on_the_page_removes_the_bug():
    answer = re.search(r"```diff\n(.*?)```", (CHAPTER / "index.md").read_text(), re.DOTALL)
    assert answer, "the page shows no diff"
    lines = [line[4:] if line.startswith("    ") else line for line in answer[1].splitlines()]
    old = "\n".join(line[1:] for line in lines if line.startswith(("-", " ")))
    new = "\n".join(line[1:] for line in lines if line.startswith(("+", " ")))
    if old not in SOURCE:
        pytest.skip("bug_hunt.py is mended already")
    mended = SOURCE.replace(old, new)
    assert run(after_hanging_up(mended, tokenized_before=False)) == (0, False)
    assert run(after_hanging_up(mended, tokenized_before=True)) == (1, False)
