"""Compiles a CUDA source for an architecture with NVRTC, and keeps the result. Needs neither a GPU nor a toolkit.

Knows nothing of what the sources compute. Includes are put in place here, before the compiler sees the text: it is then
whole, its hash names it, and a course can replace any part of it by a reader's file.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from minisgl_kernels.cpu.build import cache_folder

FOLDER = Path(__file__).parent
_INCLUDE = re.compile(r'\s*#\s*include\s+"(.+?)"')
_COMPLAINT = re.compile(r"^(?P<file>\S.*?)\((?P<line>\d+)\): (?P<what>(?:catastrophic )?error.*)", re.MULTILINE)
Macros = Mapping[str, str | int]


class CompileError(Exception):
    """A CUDA source does not compile. The message shows each line that the compiler complains of, and its log."""


def source_path(name: str) -> Path:
    """The file of a source or header: ours, or what MINISGL_CUDA_SOURCES puts in its place.

    The variable holds entries name=path, separated as in PATH.

    Raises:
        FileNotFoundError: there is no such source.
    """
    for entry in filter(None, os.environ.get("MINISGL_CUDA_SOURCES", "").split(os.pathsep)):
        replaced, _, path = entry.partition("=")
        if replaced == name:
            return Path(path)
    if not (FOLDER / name).is_file():
        raise FileNotFoundError(f"no CUDA source {name} in {FOLDER}")
    return FOLDER / name


def expand(name: str, seen: set[str] | None = None) -> str:
    """The text of a source with its includes in place, each once, and #line directives that name the files."""
    seen = set() if seen is None else seen
    seen.add(name)
    path = source_path(name)
    lines = [f'#line 1 "{path.as_posix()}"']
    for number, line in enumerate(path.read_text().splitlines(), 1):
        include = _INCLUDE.match(line)
        if include is None:
            lines.append("" if line.strip() == "#pragma once" else line)
            continue
        if include[1] not in seen:
            lines.append(expand(include[1], seen))
        lines.append(f'#line {number + 1} "{path.as_posix()}"')
    return "\n".join(lines)


def compile_cuda(name: str, macros: Macros, arch: str) -> bytes:
    """The cubin of a source for an architecture such as sm_90, compiled unless an equal one is kept.

    Raises:
        CompileError: the source is wrong.
        ImportError: cuda-core, cuda-bindings or NVRTC is not installed.
        FileNotFoundError: there is no such source.
    """
    text = expand(name)
    parts = [text, repr(sorted(macros.items())), arch, nvrtc_version()]
    folder = cache_folder()
    kept = folder / f"{Path(name).stem}-{arch}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.cubin"
    if kept.exists():
        return kept.read_bytes()
    cubin = _nvrtc(name, text, macros, arch)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:  # two processes may compile at once
        output = Path(temporary) / kept.name
        output.write_bytes(cubin)
        output.replace(kept)
    return cubin


@functools.cache
def nvrtc_version() -> str:
    """The version of the compiler, such as 13.0."""
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


def _nvrtc(name: str, text: str, macros: Macros, arch: str) -> bytes:
    core = _core()
    defined = [(macro, str(value)) for macro, value in macros.items()]
    options = core.ProgramOptions(std="c++17", arch=arch, define_macro=defined)
    try:
        return bytes(core.Program(text, "c++", options).compile("cubin").code)
    except Exception as error:  # its class is private to cuda-core
        raise CompileError(_explain(name, arch, str(error))) from error


@functools.cache
def _core() -> ModuleType:
    """cuda.core, which was called experimental before version 1."""
    try:
        core = importlib.import_module("cuda.core")
        if hasattr(core, "Program"):
            return core
    except ImportError as error:
        if error.name != "cuda.core":
            raise
    return importlib.import_module("cuda.core.experimental")


def _explain(name: str, arch: str, log: str) -> str:
    """The compiler's log, headed by the lines that it complains of."""
    shown = [f"{name} does not compile for {arch}"]
    for complaint in _COMPLAINT.finditer(log):
        path, line = Path(complaint["file"]), int(complaint["line"])
        shown.append(f"{path}:{line}: {complaint['what']}")
        source = path.read_text().splitlines() if path.is_file() else []
        for number in range(max(1, line - 2), min(len(source), line + 1) + 1):
            shown.append(f"{'>' if number == line else ' '} {number:4} | {source[number - 1]}")
    return "\n".join([*shown, "", log.strip()])
