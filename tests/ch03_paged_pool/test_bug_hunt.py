"""The bug hunt of chapter 3. Strict xfail keeps the bug in the repository; --runxfail shows it to whoever hunts it."""

from __future__ import annotations

import re
import textwrap
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

from minisgl.core import SamplingParams
from minisgl.simple import naive_generate
from tests.helpers import tiny_model

CHAPTER = Path(__file__).parents[2] / "chapters" / "03_paged_pool"
SOURCE = (CHAPTER / "bug_hunt.py").read_text()
PAGE_SIZE = 4
PROMPTS = [[i * step % 90 + 5 for i in range(length)] for step, length in [(7, 25), (11, 9), (13, 5)]]
ANSWERS = [3, 8, 10]
ROOMY, FULL = 17, 12  # pages, one of them the dummy; the three need 7, 5 and 4


def run(source: str, num_pages: int) -> list[list[int]]:
    module = ModuleType("bug_hunt")
    exec(source, module.__dict__)
    answers: list[list[int]] = module.Server(tiny_model(), num_pages, PAGE_SIZE).generate(PROMPTS, ANSWERS)
    return answers


def shared_pages(source: str) -> set[int]:
    """The pages that stood in two page tables of a step in the full pool."""
    module = ModuleType("bug_hunt")
    exec(source, module.__dict__)
    shared = set()

    class Observed(module.Server):
        def step(self, running):
            held = [page for request in running for page in request.pages]
            shared.update(page for page in held if held.count(page) > 1)
            super().step(running)

    with suppress(AssertionError):  # the allocator notices later
        Observed(tiny_model(), FULL, PAGE_SIZE).generate(PROMPTS, ANSWERS)
    return shared


def expected() -> list[list[int]]:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in ANSWERS]
    return [list(naive_generate(tiny_model(), prompt, p)) for prompt, p in zip(PROMPTS, params, strict=True)]


def test_with_room_for_all_each_request_is_answered_as_alone():
    assert run(SOURCE, ROOMY) == expected()


BUG = pytest.mark.xfail(strict=True, raises=AssertionError, reason="the bug hunt of chapter 3: run with --runxfail")


@BUG
def test_no_page_stands_in_two_page_tables():
    shared = shared_pages(SOURCE)
    assert not shared, f"two requests of the same step hold pages {sorted(shared)}"


@BUG
def test_when_the_pool_runs_full_each_request_is_answered_as_alone():
    assert run(SOURCE, FULL) == expected()


def test_the_fix_on_the_page_removes_the_bug():
    answer = re.search(r"( *)```diff\n(.*?)```", (CHAPTER / "index.md").read_text(), re.DOTALL)
    assert answer, "the page shows no diff"
    lines = textwrap.dedent(answer[2].rstrip(" ")).splitlines()
    old = "\n".join(line[1:] for line in lines if line[0] in " -")
    new = "\n".join(line[1:] for line in lines if line[0] in " +")
    if new in SOURCE:
        pytest.skip("bug_hunt.py is mended already")
    assert SOURCE.count(old) == 1, "the page's diff does not apply to bug_hunt.py"
    assert run(SOURCE.replace(old, new), FULL) == expected()
