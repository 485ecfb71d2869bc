"""Tasks in Triton kernels: a stub must tell its message through the interpreter and through the compiler."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from chapters import runs, workspace
from chapters.check import check
from chapters.manifest import load_chapters

pytest.importorskip("triton", reason="Triton is not installed")

FILES = {
    "toy/fast.py": '''\
import torch
import triton
import triton.language as tl


@triton.jit
def twice(x, unused: tl.constexpr):
    """Twice x."""
    return x + x


@triton.jit
def twice_kernel(x_ptr, out_ptr, n, spare: tl.constexpr, block: tl.constexpr):
    """Twice x, one block of it a program."""
    offsets = tl.program_id(0) * block + tl.arange(0, block)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(out_ptr + offsets, twice(x, 0), mask=offsets < n)


def launch(x):
    out = torch.full_like(x, float("nan"))
    twice_kernel[(triton.cdiv(len(x), 4),)](x, out, len(x), spare=1, block=4)
    return out
''',
    "toy/compile.py": """\
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from toy.fast import twice_kernel

types = {"x_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32", "spare": "constexpr", "block": "constexpr"}
code = compile(ASTSource(twice_kernel, types, {"spare": 1, "block": 4}), target=GPUTarget("cuda", 90, 32))
print("add.f32" in code.asm["ptx"])
""",
    "tests/conftest.py": (
        'import os\n\nos.environ["TRITON_INTERPRET"] = "1"\npytest_plugins = ["chapters.pytest_plugin"]\n'
    ),
    "tests/ch20_fast/test_twice.py": """\
import torch
import triton
import triton.language as tl
from toy.fast import twice


@triton.jit
def probe(x_ptr):
    tl.store(x_ptr, twice(tl.load(x_ptr), 0))


def test_twice():
    x = torch.tensor([3.0])
    probe[(1,)](x)
    assert x.item() == 6
""",
    "tests/ch20_fast/test_kernel.py": """\
import os
import subprocess
import sys

import torch

from toy.fast import launch


def test_kernel():
    assert launch(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])).tolist() == [2, 4, 6, 8, 10]


def test_it_compiles():
    env = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "chapters.replace", "toy.compile"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.stdout == "True\\n", done.stderr
""",
    "chapters/20_fast/chapter.yml": """\
title: Fast
minutes: 5
tier: interpreter
tasks:
  - {id: "20.1", title: A device function, symbol: "toy.fast:twice", lines: 1, hints: [a, b],
     tests: [tests/ch20_fast/test_twice.py]}
  - {id: "20.2", title: A kernel, symbol: "toy.fast:twice_kernel", lines: 3, hints: [a, b],
     tests: [tests/ch20_fast/test_kernel.py]}
""",
    "chapters/20_fast/mutants.yml": """\
- {task: "20.1", why: Squares., symbol: "toy.fast:twice", replace: x + x, with: x * x}
- task: "20.2"
  why: Drops the last lane.
  symbol: "toy.fast:twice_kernel"
  replace: ", mask=offsets < n)\\n    tl.store"
  with: ", mask=offsets < n - 1)\\n    tl.store"
""",
    "chapters/20_fast/index.md": "".join(f'{{{{ task("20.{i}") }}}} {{{{ solution("20.{i}") }}}}\n' for i in (1, 2)),
}
MINE = "workspace/ch20/fast.py"


@pytest.fixture
def chapter(root):
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return load_chapters(root)[-1]


def test_check_tries_stubs_and_wrong_answers(root, chapter, monkeypatch):
    monkeypatch.setattr(runs, "PRELOAD", ["pytest", "hypothesis", "torch"])
    screen = StringIO()

    assert check(root, [chapter], Console(file=screen, width=200)), screen.getvalue()

    assert "stubs: 2 of 2 fail with our message" in screen.getvalue()
    assert "mutants: 2 of 2 caught" in screen.getvalue()


def test_an_unwritten_kernel_is_one_line_however_it_was_come_to(root, chapter, python):
    workspace.start(root, chapter)

    out, _ = python("-m", "pytest", "--mine", "tests/ch20_fast")

    called, launched, compiled = out.partition("FAILURES")[2].partition("short test summary")[0].split("____ test_")[1:]
    assert f"\n{MINE}:9: NotImplementedError: 20.1 A device function: see chapters/20_fast\n" in called
    for failure in (launched, compiled):  # by the interpreter; by a child process, from the compiler's listing
        assert f"\n{MINE}:15: NotImplementedError: 20.2 A kernel: see chapters/20_fast\n" in failure
    assert "InterpreterError" not in out
