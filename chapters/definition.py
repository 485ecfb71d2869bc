"""Where a definition stands in a file, whatever language the file is in: line numbers and a few strings."""

from __future__ import annotations

from typing import NamedTuple


class Definition(NamedTuple):
    """Lines count from 0, and ranges end before their last number, so that they slice a list of lines."""

    start: int  # the first line that belongs to it: a decorator, or in C++ the comment above it
    end: int
    line: int  # where its own first line is, from 1, as a message shows it
    body: tuple[int, int]  # what a stub replaces; the lines before it are the signature and the description
    indent: int  # of the body
    parameters: tuple[str, ...]  # as its callers know them
    flaw: str = ""  # why it cannot be a task: "is a class …"
