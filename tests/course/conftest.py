"""A course of two chapters, 1 and 12, about a package of one module: the machine must not depend on the real one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from chapters.symbols import ROOT

MODULE = '''\
"""Small sums."""  # this comment stays

from __future__ import annotations

import contextlib
from collections.abc import Iterator


def double(x: int) -> int:
    """Twice x."""
    # the trick
    return x + x  # same line


class Tally:
    """Counts."""

    def __init__(self) -> None:
        self.total = 0

    @property
    def half(self) -> float:
        return self.total / 2

    def add(self, x: int, *, times: int = 1) -> int:
        for _ in range(times):
            self.total += x
        return self.total
        # the end


@contextlib.contextmanager
def nothing() -> Iterator[None]:
    """A bystander."""
    yield


def countdown(n: int) -> Iterator[int]:
    """n, n - 1 … 1."""
    while n:
        yield n
        n -= 1


def triple(x: int) -> int:
    """Three times x."""
    return double(x) + x


def halve(x: int) -> int:
    """Half of x."""
    return x // 2
'''

TASKS = """\
title: Sums
minutes: 5
tier: cpu
tasks:
  - id: "01.1"
    title: Double
    symbol: toy.sums:double
    lines: 1
    hints: [Add, Add it to itself]
    tests: [tests/ch01_sums/test_double.py]
  - id: "01.2"
    title: Add "twice"
    symbol: toy.sums:Tally.add
    lines: 3
    hints: [Loop, Loop and add]
    tests: [tests/ch01_sums/test_rest.py::test_add]
  - id: "01.3"
    title: Count down
    symbol: toy.sums:countdown
    lines: 3
    hints: [Yield, Yield and subtract]
    tests: [tests/ch01_sums/test_rest.py::test_countdown]
"""

MUTANTS = """\
- task: "01.1"
  why: Squares.
  symbol: toy.sums:double
  replace: x + x
  with: x * x
- task: "01.3"
  why: Counts to zero.
  symbol: toy.sums:countdown
  replace: while n
  with: while n + 1
"""

FILES = {
    "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["."]\naddopts = "--import-mode=importlib"\n',
    "toy/__init__.py": "",
    "toy/sums.py": MODULE,
    "tests/conftest.py": 'pytest_plugins = ["chapters.pytest_plugin"]\n',
    "tests/ch01_sums/test_double.py": (
        "import pytest\n\nfrom toy.sums import double, triple\n\n\n"
        '@pytest.mark.parametrize("x", [0, 3])\ndef test_double(x):\n    assert double(x) == 2 * x\n\n\n'
        "def test_triple():\n    assert triple(3) == 9\n"
    ),
    "tests/ch01_sums/test_rest.py": (
        "from toy import sums\n\n\n"
        "def test_add():\n    assert sums.Tally().add(2, times=3) == 6\n\n\n"
        "def test_countdown():\n    assert list(sums.countdown(3)) == [3, 2, 1]\n"
    ),
    "chapters/01_sums/chapter.yml": TASKS,
    "chapters/01_sums/mutants.yml": MUTANTS,
    "chapters/01_sums/index.md": "".join(f'{{{{ task("01.{i}") }}}} {{{{ solution("01.{i}") }}}}\n' for i in (1, 2, 3)),
    "tests/ch12_more/test_halve.py": "from toy.sums import halve\n\n\ndef test_it():\n    assert halve(6) == 3\n",
    "chapters/12_more/chapter.yml": (
        "title: More\nminutes: 5\ntier: cpu\ntasks:\n"
        '  - {id: "12.1", title: Halve, symbol: "toy.sums:halve", lines: 1, hints: [a, b],\n'
        "     tests: [tests/ch12_more/test_halve.py]}\n"
    ),
    "chapters/12_more/index.md": '{{ task("12.1") }} {{ solution("12.1") }}\n',
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


@pytest.fixture
def edit(root: Path):
    """Replace a piece of one of the course's files."""

    def edit(name: str, old: str, new: str) -> None:
        path = root / name
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new), encoding="utf-8")

    return edit


@pytest.fixture
def python(root: Path):
    """Run Python in the course's folder, in a process of its own; what it printed, and its exit status."""

    def python(*args: str) -> tuple[str, int]:
        env = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run([sys.executable, *args], cwd=root, env=env, capture_output=True, text=True)
        return done.stdout + done.stderr, done.returncode

    return python
