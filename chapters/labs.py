"""A notebook's outputs are kept in it, so they may grow stale. Two rules catch that, as neither catches all:

- `make notebooks` notes a digest of the code cells beside the outputs that it writes. Code that was edited since has
  another digest (tests/notebooks).
- `make test` executes each notebook, and what a cell shows is compared with what is kept (notebooks/conftest.py): the
  same kinds of output, and the same words. Numbers are masked, as machines differ, and so are gaps, as columns differ.

A cell's tag says where that is too much or too little: `varies` compares its kinds only (times choose the words),
`exact` the numbers too (they are counted, not timed). Where there is a GPU nothing is compared: many cells then say
other things.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

NOTED = "code_digest"  # in a notebook's metadata
_NUMBER = re.compile(r"(?:(?<![\w.])[-+])?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?|\b(?:inf|nan)\b")
Notebook = Mapping[str, Any]


def code_digest(notebook: Notebook) -> str:
    """Of the sources of all code cells."""
    sources = "\n\0\n".join(cell["source"] for cell in code_cells(notebook))
    return hashlib.sha256(sources.encode()).hexdigest()[:16]


def code_cells(notebook: Notebook) -> list[Any]:
    """Those that can be executed."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def note(notebook: Any) -> None:
    """After an execution: note of what code the outputs are, and drop when each cell ran."""
    notebook["metadata"][NOTED] = code_digest(notebook)
    for cell in code_cells(notebook):
        cell["metadata"].pop("execution", None)


def differences(kept: Notebook, executed: Notebook) -> Iterator[str]:
    """What an execution shows otherwise than what is kept, a line for each cell."""
    for number, (old, new) in enumerate(zip(code_cells(kept), code_cells(executed), strict=True), 1):
        was, now = (_shown(cell) for cell in (old, new))
        if was[0] != now[0]:
            yield f"code cell {number} showed {_list(was[0])}, and now shows {_list(now[0])}"
        elif was[1] != now[1]:
            yield f"code cell {number} said {_cut(was[1], now[1])!r}, and now says {_cut(now[1], was[1])!r}"


def _shown(cell: Mapping[str, Any]) -> tuple[set[str], str]:
    """The kinds of a cell's outputs, and those of its words that are compared."""
    kinds, words = set(), ""
    for output in cell["outputs"]:
        if output.get("name") == "stderr":  # warnings, which depend on what else is installed
            continue
        data = output.get("data", {})
        kinds |= set(data) - {"text/plain"} or {output.get("name", "text")}
        words += output.get("text") or ("" if "image/png" in data else data.get("text/plain", ""))
    tags = cell["metadata"].get("tags", [])
    if "varies" in tags:
        return kinds, ""
    return kinds, words if "exact" in tags else " ".join(_NUMBER.sub("#", words).split())


def _list(kinds: set[str]) -> str:
    return " and ".join(sorted(kinds)) or "nothing"


def _cut(text: str, other: str) -> str:
    """The text from a little before the place where the other one differs."""
    same = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    return text[max(same - 20, 0) : same + 60]
