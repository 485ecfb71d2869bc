"""The bug hunt of chapter 5. Strict xfail keeps the bug in the repository; --runxfail shows it to whoever hunts it."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.ch05_continuous_batching.harness import drive, new_request, new_scheduler

CHAPTER = Path(__file__).parents[2] / "chapters" / "05_continuous_batching"
SOURCE = (CHAPTER / "bug_hunt.py").read_text()
SLOTS = 96


def run(source: str, page_size: int) -> list[int]:
    """Eight requests over a pool of 96 slots; the lengths of their answers."""
    module = ModuleType("bug_hunt")
    exec(source, module.__dict__)
    plain = new_scheduler(SLOTS // page_size, page_size=page_size, max_batch_tokens=16)
    scheduler = module.PromisingScheduler(plain.config, plain.cache, plain.max_len)
    requests = [new_request(i, prompt=10 + 3 * i, max_tokens=8) for i in range(8)]
    for request in requests:
        request.stop_ids = frozenset()
    drive(scheduler, [(2 * request.id, request) for request in requests], most_steps=500)
    assert scheduler.work.preemptions == 0, "it was to be promised, not preempted"
    return [len(request.output) for request in requests]


def test_with_pages_of_one_token_everybody_is_answered():
    assert run(SOURCE, page_size=1) == [8] * 8


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="the bug hunt of chapter 5: run with --runxfail")
@pytest.mark.parametrize("page_size", [4, 16])
def test_with_larger_pages_everybody_is_answered(page_size):
    assert run(SOURCE, page_size) == [8] * 8


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_fix_on_the_page_removes_the_bug(page_size):
    answer = re.search(r"```diff\n(.*?)```", (CHAPTER / "index.md").read_text(), re.DOTALL)
    assert answer, "the page shows no diff"
    lines = [line.strip() for line in answer[1].splitlines()]
    [old] = [line[1:] for line in lines if line.startswith("-")]
    [new] = [line[1:] for line in lines if line.startswith("+")]
    if old not in SOURCE:
        pytest.skip("bug_hunt.py is mended already")
    assert run(SOURCE.replace(old, new), page_size) == [8] * 8
