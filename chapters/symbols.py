"""Finds a function or class by name in the repository's source, Python or CUDA C++, by its text alone."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from chapters import cuda_source, python_source
from chapters.definition import Definition

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"minisgl_kernels": "kernels", "minisgl_hub": "hub"}  # of the packages that do not lie in the root
CUDA = (".cu", ".cuh")


class UnknownSymbol(Exception):
    """No such module or definition; the message says which."""


class Symbol(NamedTuple):
    """Where a definition stands, and its text."""

    path: Path  # relative to the repository root
    place: Definition
    source: str  # as it stands in the file: decorators or the comment above it included, not dedented

    @property
    def head(self) -> str:
        """Signature and description: all before the body."""
        return "\n".join(self.source.split("\n")[: self.place.body[0] - self.place.start])


def language(path: Path) -> ModuleType:
    """`python_source` or `cuda_source`, by the file's suffix."""
    return cuda_source if path.suffix in CUDA else python_source


def module_path(root: Path, module: str) -> Path:
    """The file of a dotted module, relative to the root: Python, or CUDA C++ where there is no Python of that name."""
    stem = Path(FOLDERS.get(module.partition(".")[0], "")).joinpath(*module.split("."))
    candidates = [stem.with_suffix(".py"), stem / "__init__.py", *(stem.with_suffix(suffix) for suffix in CUDA)]
    for path in candidates:
        if (root / path).is_file():
            return path
    raise UnknownSymbol(f"no module {module!r} here: there is no {candidates[0].as_posix()}, nor a .cu or .cuh")


def find(root: Path, name: str) -> Symbol:
    """Find `package.module:function`, `package.module:Class` or `package.module:Class.method` under root."""
    module, _, qualname = name.partition(":")
    path = module_path(root, module)
    if not qualname:
        raise UnknownSymbol(f"{name!r} names a module only; write package.module:function or :Class.method")
    text = (root / path).read_text(encoding="utf-8")
    place = language(path).find(text, qualname)
    if place is None:
        raise UnknownSymbol(f"{name!r}: {path.as_posix()} defines no {qualname!r}")
    return Symbol(path, place, "\n".join(text.split("\n")[place.start : place.end]))
