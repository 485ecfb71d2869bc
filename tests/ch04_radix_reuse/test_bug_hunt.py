"""The bug hunt of chapter 4. Strict xfail keeps the bug in the repository; --runxfail shows it to whoever hunts it."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from minisgl.config import EngineConfig
from minisgl.core import Request, SamplingParams
from minisgl.engine.engine import Engine
from minisgl.simple import naive_generate
from tests.helpers import tiny_model

CHAPTER = Path(__file__).parents[2] / "chapters" / "04_radix_reuse"
SOURCE = (CHAPTER / "bug_hunt.py").read_text()
SYSTEM = [(i * 37 + 11) % 120 + 8 for i in range(22)]  # one page of 16, and 6 tokens of the next
PROMPTS = [[*SYSTEM, 40 + i] for i in range(3)]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
MODEL = tiny_model()


def run(source: str, side_by_side: bool) -> tuple[list[list[int]], int]:
    """The answers, and how many prompt tokens were reused. Side by side, each prompt arrives a step later."""
    module = ModuleType("bug_hunt")
    exec(source, module.__dict__)
    engine = Engine(MODEL, EngineConfig(page_size=16, kv_pages=32))
    engine.scheduler.cache = module.TailSharing(engine.pages, 16, engine.prefix)
    requests = [Request(i, list(prompt), PARAMS) for i, prompt in enumerate(PROMPTS)]
    for request in requests:
        engine.add(request)
        engine.step()
        while engine.has_work and not side_by_side:
            engine.step()
    while engine.has_work:
        engine.step()
    engine.prefix.evict(engine.pages.capacity)
    assert engine.pages.num_free == engine.pages.capacity, "holding and releasing is not the bug"
    return [request.output for request in requests], engine.work.tokens_reused


def expected() -> list[list[int]]:
    return [list(naive_generate(MODEL, prompt, PARAMS)) for prompt in PROMPTS]


def test_one_after_another_they_are_answered_as_in_chapter_1():
    assert run(SOURCE, side_by_side=False)[0] == expected()


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="the bug hunt of chapter 4: run with --runxfail")
def test_side_by_side_they_are_answered_as_in_chapter_1():
    assert run(SOURCE, side_by_side=True)[0] == expected()


def test_the_fix_on_the_page_removes_the_bug():
    if run(SOURCE, side_by_side=True)[0] == expected():
        pytest.skip("bug_hunt.py is mended already")
    answer = re.search(r"```diff\n(.*?)```", (CHAPTER / "index.md").read_text(), re.DOTALL)
    assert answer, "the page shows no diff"
    lines = [line.strip() for line in answer[1].splitlines()]
    [old] = [line[1:].strip() for line in lines if line.startswith("-")]
    [new] = [line[1:].strip() for line in lines if line.startswith("+")]
    assert SOURCE.count(old) == 1, "the page's diff does not apply to bug_hunt.py"

    answers, reused = run(SOURCE.replace(old, new), side_by_side=True)

    assert answers == expected()
    assert reused == 32, "the second and the third request still share the whole page"
