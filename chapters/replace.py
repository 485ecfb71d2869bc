"""Uses other files in place of modules. Whoever imports such a module afterwards gets the file, and whoever compiles
such a CUDA source compiles it: `minisgl_kernels.cuda.build` reads the variable set here, in child processes too. The
processes of an engine (`minisgl.distributed.ranks`) call `inherit` when they start.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

from chapters.manifest import CourseError
from chapters.symbols import CUDA

SOURCES = "MINISGL_CUDA_SOURCES"  # name=path of each CUDA file, joined by os.pathsep
AT_START = "MINISGL_AT_START"  # what the processes of an engine call first
MODULES = "MINISGL_MODULES"  # module=path of each Python file, for `inherit`


class _Finder(MetaPathFinder):
    def __init__(self, files: Mapping[str, Path]) -> None:
        self.files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self.files.get(fullname)
        return spec_from_file_location(fullname, file) if file else None


def install(files: Mapping[str, Path]) -> None:
    """From now on, importing a module of `files` imports the file, and compiling one of CUDA C++ compiles the file.

    Raises:
        CourseError: one of the modules is imported already, so that its importers would keep the old one.
    """
    modules = importable(files)
    for module in modules:
        if module in sys.modules:
            raise CourseError(f"{module} was imported before it could be replaced: import it later, or in a function")
    sys.meta_path.insert(0, _Finder(modules))
    os.environ.update(variables(files))


def variables(files: Mapping[str, Path]) -> dict[str, str]:
    """What tells a child process, and the processes of its engine, to use the files: see `inherit`."""
    modules = importable(files)
    told = {AT_START: "chapters.replace:inherit"}
    told[MODULES] = os.pathsep.join(f"{module}={path}" for module, path in modules.items())
    cuda = {module.rpartition(".")[2] + path.suffix: path for module, path in files.items() if module not in modules}
    if cuda:
        told[SOURCES] = os.pathsep.join(f"{name}={path}" for name, path in cuda.items())
    return told


def inherit() -> None:
    """In a child process: replace the modules that its parent replaces. CUDA sources need no call."""
    entries = filter(None, os.environ.get(MODULES, "").split(os.pathsep))
    install({module: Path(path) for module, _, path in (entry.partition("=") for entry in entries)})


def importable(files: Mapping[str, Path]) -> dict[str, Path]:
    """Those of `files` that are Python."""
    return {module: path for module, path in files.items() if path.suffix not in CUDA}


def load(root: Path, files: Mapping[str, Path]) -> None:
    """Import the modules of `files`, after `install`.

    Raises:
        CourseError: one cannot be imported; the message names the line.
    """
    own = {str(path) for path in files.values()}
    for module in importable(files):
        try:
            importlib.import_module(module)
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            frame = ([f for f in frames if f.filename in own] or frames)[-1]
            place = f"{os.path.relpath(frame.filename, root)}:{frame.lineno}"
            raise CourseError(f"{place}: {type(error).__name__}: {' '.join(str(error).split())}") from None


if __name__ == "__main__":  # python -m chapters.replace MODULE ARGS …: run a module as a child that inherits
    del sys.argv[0]
    inherit()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
