"""The errors that the troubleshooting page quotes are those that somebody can meet."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "chapters/reference/troubleshooting.md"
FOLDERS = ("minisgl", "kernels", "hub", "chapters", "scripts")
OF_OTHERS = re.compile(r", from (torch|Triton|Jupyter)|No module named")  # headings that quote what is not our own


def texts() -> list[str]:
    """Every string of our code; of one with placeholders, its parts joined by an ellipsis."""
    found = []
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                    found.append("".join(parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


def quoted(heading: str) -> list[str]:
    """The code spans of a heading that are messages: those of several words."""
    return [span for span in re.findall(r"`([^`]+)`", heading) if " " in span]


def forms(piece: str) -> list[str]:
    """A piece as it is, and with one of its words in a placeholder's place: the page quotes an example."""
    words = piece.split(" ")
    return [piece] + [" ".join([*words[:i], "…", *words[i + 1 :]]) for i in range(len(words)) if len(words) > 2]


def test_every_quoted_error_of_ours_is_a_text_of_our_code():
    headings = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("### ")]
    known = texts()
    wrong = []
    for heading in headings:
        for message in [] if OF_OTHERS.search(heading) else quoted(heading):
            pieces = [piece.strip() for piece in message.split("…") if len(piece.strip()) > 3]
            wrong += [piece for piece in pieces if not any(form in text for form in forms(piece) for text in known)]

    assert wrong == []


def test_the_page_knows_what_readers_meet_first():
    text = PAGE.read_text(encoding="utf-8")
    met = ("no kernel image", "out of memory", "hold NaN", "It is slow", "triton is not installed", "flash-attn",
           "is taken", "cannot be had", "rank … failed", "No such kernel")  # fmt: skip

    assert [words for words in met if words not in text] == []
