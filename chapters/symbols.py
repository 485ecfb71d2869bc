"""Finds a function or class by name in the repository's source, by syntax tree: nothing is imported or run."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"minisgl_kernels": "kernels", "minisgl_hub": "hub"}  # of the packages that do not lie in the root


class UnknownSymbol(Exception):
    """No such module or definition; the message says which."""


class Symbol(NamedTuple):
    """Where a definition stands, and its text."""

    path: Path  # relative to the repository root
    node: Definition
    source: str  # as it stands in the file: decorators included, not dedented


def module_path(module: str) -> Path:
    """The file of a dotted module, relative to the root."""
    return Path(FOLDERS.get(module.partition(".")[0], "")).joinpath(*module.split(".")).with_suffix(".py")


def find(root: Path, name: str) -> Symbol:
    """Find `package.module:function`, `package.module:Class` or `package.module:Class.method` under root."""
    module, colon, qualname = name.partition(":")
    path = module_path(module)
    if not (root / path).is_file():
        path = path.with_suffix("") / "__init__.py"
    if not colon or not (root / path).is_file():
        raise UnknownSymbol(f"{name!r}: no module {module!r} here; write package.module:function or :Class.method")
    text = (root / path).read_text(encoding="utf-8")
    node = definition(ast.parse(text, filename=str(path)), qualname)
    if node is None:
        raise UnknownSymbol(f"{name!r}: {path.as_posix()} defines no {qualname!r}")
    lines = text.splitlines()[first_line(node) - 1 : node.end_lineno]
    return Symbol(path, node, "\n".join(lines))


def definition(tree: ast.Module, qualname: str) -> Definition | None:
    """The definition of `function`, `Class` or `Class.method` in a module's tree."""
    scope: ast.Module | Definition = tree
    for part in qualname.split("."):
        found = next((n for n in scope.body if isinstance(n, Definition) and n.name == part), None)
        if found is None:
            return None
        scope = found
    return found


def first_line(node: Definition) -> int:
    """The line a definition begins at, its decorators included."""
    return min([node.lineno, *(d.lineno for d in node.decorator_list)])
