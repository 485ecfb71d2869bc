"""Wrong answers made from right ones."""

from __future__ import annotations

from pathlib import Path

from chapters import symbols
from chapters.manifest import CourseError, Mutant


def mutate(root: Path, mutant: Mutant) -> str:
    """The text of the mutant's module with its one edit.

    Raises:
        CourseError: the edit no longer fits the source, or leaves no program (of C++, only brackets are checked).
    """
    symbol = symbols.find(root, mutant.symbol)
    if (count := symbol.source.count(mutant.old)) != 1:
        raise CourseError(f"its `replace` stands {count} times in {mutant.symbol}, but must stand there once")
    lines = (root / symbol.path).read_text(encoding="utf-8").split("\n")
    lines[symbol.place.start : symbol.place.end] = [symbol.source.replace(mutant.old, mutant.new)]
    text = "\n".join(lines)
    language = symbols.language(symbol.path)
    try:
        language.check(text, str(symbol.path))
    except SyntaxError as error:
        raise CourseError(f"it is not {language.NAME}: line {error.lineno}: {error.msg}") from None
    return text
