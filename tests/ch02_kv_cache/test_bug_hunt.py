"""The bug hunt of chapter 2. Strict xfail keeps the bug in the repository; --runxfail shows it to whoever hunts it."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from minisgl.core import SamplingParams
from minisgl.simple import cached_generate
from tests.helpers import tiny_model

CHAPTER = Path(__file__).parents[2] / "chapters" / "02_kv_cache"
SOURCE = (CHAPTER / "bug_hunt.py").read_text()
PROMPT = [i * 7 % 90 + 5 for i in range(40)]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
CHUNK_TOKENS = 16


def run(source: str, prompt: list[int]) -> list[int]:
    module = ModuleType("bug_hunt")
    exec(source, module.__dict__)
    return list(module.chunked_generate(tiny_model(), prompt, PARAMS, CHUNK_TOKENS))


def expected(prompt: list[int]) -> list[int]:
    return list(cached_generate(tiny_model(), prompt, PARAMS))


@pytest.mark.parametrize("length", [1, 15, 16])
def test_a_prompt_of_one_chunk_is_answered_as_without_chunks(length):
    assert run(SOURCE, PROMPT[:length]) == expected(PROMPT[:length])


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="the bug hunt of chapter 2: run with --runxfail")
def test_a_prompt_of_three_chunks_is_answered_as_without_chunks():
    assert run(SOURCE, PROMPT) == expected(PROMPT)


def test_the_fix_on_the_page_removes_the_bug():
    if run(SOURCE, PROMPT) == expected(PROMPT):
        pytest.skip("bug_hunt.py is mended already")
    answer = re.search(r"```diff\n(.*?)```", (CHAPTER / "index.md").read_text(), re.DOTALL)
    assert answer, "the page shows no diff"
    lines = [line.strip() for line in answer[1].splitlines()]
    [old] = [line[1:] for line in lines if line.startswith("-")]
    [new] = [line[1:] for line in lines if line.startswith("+")]
    fixed = SOURCE.replace(old, new)
    assert fixed != SOURCE, "the page's diff does not apply to bug_hunt.py"
    assert run(fixed, PROMPT) == expected(PROMPT)
