"""What the course does to Python text, by syntax tree: nothing is imported or run.

`cuda_source` has the same names for C++; `symbols.language` chooses between them.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable

from chapters.definition import Definition

NAME = "Python"
LEXER = "python"  # the highlighter's name
GAP = "    ..."  # stands for a body on a page

_Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def find(text: str, qualname: str) -> Definition | None:
    """The definition of `function`, `Class` or `Class.method`; SyntaxError if the text is not Python."""
    node = _node(ast.parse(text), qualname)
    if node is None:
        return None
    lines = text.split("\n")
    first = _first(node)
    if isinstance(node, ast.ClassDef):
        flaw = "is a class; a task is a function or a method"
        return Definition(first, _end(node), node.lineno, (first, first), 0, (), flaw)
    start, end, flaw = _body(node, lines)
    return Definition(first, _end(node), node.lineno, (start, end), node.col_offset + 4, _parameters(node.args), flaw)


def stub(message: str) -> str:
    """The statement that stands for a body not yet written."""
    return f"raise NotImplementedError({json.dumps(message, ensure_ascii=False)})"


def said(message: str) -> str:
    """How that statement is told when it is reached."""
    return f"NotImplementedError: {message}"


def check(text: str, name: str) -> None:
    """Raise SyntaxError if the text is not Python."""
    compile(text, name, "exec", dont_inherit=True)


def code_lines(lines: Iterable[str]) -> int:
    """How many lines are neither blank nor comment."""
    return sum(1 for line in lines if line.strip() and not line.lstrip().startswith("#"))


def meaning(text: str, without: Iterable[str] = ()) -> str:
    """A text that changes only when the code does, and not with the bodies of the functions in `without`."""
    tree = ast.parse(text)
    for qualname in without:
        if node := _node(tree, qualname):
            node.body = []
    return ast.dump(tree)


def _node(tree: ast.Module, qualname: str) -> _Node | None:
    scope: ast.Module | _Node = tree
    for part in qualname.split("."):
        found = next((n for n in scope.body if isinstance(n, _Node) and n.name == part), None)
        if found is None:
            return None
        scope = found
    assert not isinstance(scope, ast.Module)
    return scope


def _body(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> tuple[int, int, str]:
    """Where the body without its docstring begins and ends, and why it cannot be taken out."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if not body or not lines[body[0].lineno - 1][: body[0].col_offset].isspace():
        return _end(node), _end(node), "has no body on lines of its own to take out"
    start = _first(body[0])
    while lines[start - 1].lstrip().startswith("#") or not lines[start - 1].strip():
        start -= 1  # a comment before the first statement tells as much as the statement
    end = _end(node)
    while end < len(lines) and lines[end].lstrip().startswith("#") and _indent(lines[end]) > node.col_offset:
        end += 1
    return start, end, ""


def _first(node: ast.stmt) -> int:
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _parameters(args: ast.arguments) -> tuple[str, ...]:
    starred = [f"*{args.vararg.arg}"] if args.vararg else ["*"] if args.kwonlyargs else []
    double = [f"**{args.kwarg.arg}"] if args.kwarg else []
    return (*(a.arg for a in [*args.posonlyargs, *args.args]), *starred, *(a.arg for a in args.kwonlyargs), *double)
