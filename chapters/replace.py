"""Imports other files in place of modules. Whoever imports such a module afterwards gets the file."""

from __future__ import annotations

import sys
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
