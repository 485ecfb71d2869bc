"""Runs a part of a benchmark in a process of its own, so that nothing of another part is left: no memory, no cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from benchmarks.record import RESULTS

MARK = "result: "  # before the line that the parent reads


def give_back(result: Any) -> None:
    """In the child: hand the result to the parent."""
    print(MARK + json.dumps(result), flush=True)


def run(module: str, *extra: str, what: str) -> Any:
    """`python -m module` with this process's own options and some more; returns what it gives back.

    Raises:
        SystemExit: it failed; its error stands on stderr.
    """
    command = [sys.executable, "-m", module, *sys.argv[1:], *extra]
    done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        raise SystemExit(f"{what} failed: its error stands above")
    return json.loads(lines[-1].removeprefix(MARK))


def environment() -> dict[str, str]:
    """This process's own, for another that shall find the packages of this clone from any folder."""
    root = RESULTS.parents[1]
    places = [str(root), str(root / "kernels"), str(root / "hub"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(places)}
