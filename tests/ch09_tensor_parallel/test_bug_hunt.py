"""The bug hunt of chapter 9. Strict xfail keeps the bug in the repository; --runxfail shows it to whoever hunts it."""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from types import ModuleType

import pytest

from minisgl.config import EngineConfig
from minisgl.core import SamplingParams
from minisgl.engine.engine import Engine
from minisgl.simple import naive_generate
from tests.distributed.group import in_threads, load_rank
from tests.helpers import hf_state, tiny_model

CHAPTER = Path(__file__).parents[2] / "chapters" / "09_tensor_parallel"
SOURCE = (CHAPTER / "bug_hunt.py").read_text()
MODEL = tiny_model(num_heads=6, num_kv_heads=2, intermediate_size=48)
PROMPTS = [[3 + i, 99 - i, 14, 15 + 7 * i] for i in range(8)]
CONFIG = EngineConfig(kv_pages=40, page_size=4, attention="torch", kernels="torch", graphs="off")
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.0)


class Name(str):
    """A string on one rank. Strings hash otherwise in every process of Python; the ranks are threads of one here."""

    def __new__(cls, text, rank):
        name = super().__new__(cls, text)
        name.salted = zlib.crc32(f"{rank} {text}".encode())
        return name

    def __hash__(self):
        return self.salted


def run(source: str, together: bool) -> list[list[list[int]]]:
    """The answers as each rank has them. Not together, each prompt comes when the one before has been answered."""

    def rank(comm):
        module = ModuleType("bug_hunt")
        exec(source, module.__dict__)
        engine = Engine(load_rank(comm, MODEL.config, hf_state(MODEL).items()), CONFIG, comm)
        planning, names = module.SelfPlanning(engine), [Name(f"chat-{i}", comm.rank) for i in range(len(PROMPTS))]
        for name, prompt in zip(names, PROMPTS, strict=True):
            planning.ask(name, prompt, PARAMS)
            for _ in range(0 if together else PARAMS.max_tokens):
                planning.step()
        while not all(name in planning.begun and planning.begun[name].finish_reason for name in names):
            planning.step()
        return [planning.begun[name].output for name in names]

    return in_threads(2, rank)


def expected() -> list[list[list[int]]]:
    return [[list(naive_generate(MODEL, prompt, PARAMS)) for prompt in PROMPTS]] * 2


def test_one_after_another_they_are_answered_as_by_one_process():
    assert run(SOURCE, together=False) == expected()


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="the bug hunt of chapter 9: run with --runxfail")
def test_together_they_are_answered_as_by_one_process():
    assert run(SOURCE, together=True) == expected()


def test_the_fix_on_the_page_removes_the_bug():
    answer = re.search(r"```diff\n(.*?)```", (CHAPTER / "index.md").read_text(), re.DOTALL)
    assert answer, "the page shows no diff"
    lines = [line.strip() for line in answer[1].splitlines()]
    [old] = [line[1:] for line in lines if line.startswith("-")]
    [new] = [line[1:] for line in lines if line.startswith("+")]
    if old not in SOURCE:
        pytest.skip("bug_hunt.py is mended already")
    assert run(SOURCE.replace(old, new), together=True) == expected()
