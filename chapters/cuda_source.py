"""What the course does to CUDA C++ text, by its brackets: nothing is compiled. The names are those of `python_source`.

Knows comments, strings and preprocessor lines; not namespaces, methods or overloads (the first definition of a name
counts), nor braces that only one branch of an `#if` opens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from chapters.definition import Definition

NAME = "C++"
LEXER = "cpp"
GAP = "    ...\n}"

_COMMENT = r"//[^\n]*|/\*.*?\*/"
_STRING = r'"(?:\\.|[^"\\\n])*"' + r"|'(?:\\.|[^'\\\n])*'"
_PREPROCESSOR = r"^[ \t]*#(?:\\\n|[^\n])*"
_PAIRS = {")": "(", "]": "[", "}": "{"}


def find(text: str, qualname: str) -> Definition | None:
    """The definition of a function, with its template line and the comment above it."""
    code = _blank(f"{_COMMENT}|{_STRING}", text)
    plain = _blank(_PREPROCESSOR, code)
    for name in re.finditer(rf"\b{re.escape(qualname)}\s*\(", plain):
        close = _closing(plain, name.end() - 1)
        opening = re.compile(r"\)\s*\{").match(plain, close)
        if opening:  # else it is called or declared here
            return _definition(text, code, plain, name.start(), (name.end(), close), opening.end() - 1)
    return None


def stub(message: str) -> str:
    """The line that stands for a body not yet written: every compiler prints it."""
    return f"#error {message}"


said = stub


def check(text: str, name: str) -> None:
    """Raise SyntaxError if a bracket has no partner; what else is wrong, the compiler tells."""
    plain = _blank(_PREPROCESSOR, _blank(f"{_COMMENT}|{_STRING}", text))
    opened: list[tuple[str, int]] = []
    for bracket in re.finditer(r"[][(){}]", plain):
        kind, line = bracket[0], text.count("\n", 0, bracket.start()) + 1
        if kind not in _PAIRS:
            opened.append((kind, line))
        elif not opened or opened.pop()[0] != _PAIRS[kind]:
            raise SyntaxError(f"{kind!r} closes nothing", (name, line, None, None))
    if opened:
        raise SyntaxError(f"{opened[-1][0]!r} is never closed", (name, opened[-1][1], None, None))


def code_lines(lines: Iterable[str]) -> int:
    """How many lines hold more than comment."""
    return sum(1 for line in _blank(_COMMENT, "\n".join(lines)).split("\n") if line.strip())


def meaning(text: str, without: Iterable[str] = ()) -> str:
    """The text's tokens, without comments and without the bodies of the functions in `without`."""
    lines = text.split("\n")
    found = (find(text, name) for name in without)
    for start, end in sorted((definition.body for definition in found if definition), reverse=True):
        del lines[start:end]
    return " ".join(_tokens("\n".join(lines)))


def _definition(text: str, code: str, plain: str, name: int, inside: tuple[int, int], opening: int) -> Definition:
    """From where its name, its parameters and its opening brace are."""
    closing = _closing(plain, opening)
    before = max(plain.rfind(bracket, 0, name) for bracket in ";{}") + 1
    line = _line(text, re.compile(r"\s*").match(plain, before).end())  # type: ignore[union-attr]  # it always matches
    lines, code_of = text.split("\n"), code.split("\n")
    start = line
    while start and lines[start - 1].strip() and not code_of[start - 1].strip():
        start -= 1  # a comment, right above
    first, last = _line(text, opening) + 1, _line(text, closing)
    alone = not code[opening + 1 :].partition("\n")[0].strip() and not code_of[last].partition("}")[0].strip()
    flaw = "" if first <= last and alone else "has no body on lines of its own to take out"
    indent = len(lines[line]) - len(lines[line].lstrip()) + 4
    parameters = " ".join(_tokens(text[inside[0] : inside[1]]))
    shown = re.sub(r" (?=[,*&<>:\[\])])|(?<=[<:\[(]) |(?<=\( [&*]) ", "", parameters)
    return Definition(start, last + 1, line + 1, (first, last), indent, (shown,), flaw)


def _blank(pattern: str, text: str) -> str:
    """The text with matches overwritten by spaces: every other character keeps its place."""
    return re.sub(pattern, lambda match: re.sub(r"[^\n]", " ", match[0]), text, flags=re.DOTALL | re.MULTILINE)


def _closing(plain: str, opening: int) -> int:
    """Where the bracket at `opening` is closed; the end of the text if it never is."""
    kind = plain[opening]
    partner = next(close for close, own in _PAIRS.items() if own == kind)
    depth = 0
    for i in range(opening, len(plain)):
        depth += (plain[i] == kind) - (plain[i] == partner)
        if depth == 0:
            return i
    return len(plain) - 1


def _tokens(text: str) -> list[str]:
    found = re.findall(rf"{_COMMENT}|{_STRING}|\w+|[^\w\s]", text, flags=re.DOTALL)
    return [token for token in found if not token.startswith(("//", "/*"))]


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at)
