"""Imports other files in place of modules. Whoever imports such a module afterwards gets the file."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

from chapters.manifest import CourseError


class _Finder(MetaPathFinder):
    def __init__(self, files: Mapping[str, Path]) -> None:
        self.files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self.files.get(fullname)
        return spec_from_file_location(fullname, file) if file else None


def install(files: Mapping[str, Path]) -> None:
    """From now on, importing a module of `files` imports the file.

    Raises:
        CourseError: one of the modules is imported already, so that its importers would keep the old one.
    """
    for module in files:
        if module in sys.modules:
            raise CourseError(f"{module} was imported before it could be replaced: import it later, or in a function")
    sys.meta_path.insert(0, _Finder(files))


def load(root: Path, files: Mapping[str, Path]) -> None:
    """Import the modules of `files`, after `install`.

    Raises:
        CourseError: one cannot be imported; the message names the line.
    """
    own = {str(path) for path in files.values()}
    for module in files:
        try:
            importlib.import_module(module)
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            frame = ([f for f in frames if f.filename in own] or frames)[-1]
            place = f"{os.path.relpath(frame.filename, root)}:{frame.lineno}"
            raise CourseError(f"{place}: {type(error).__name__}: {' '.join(str(error).split())}") from None
