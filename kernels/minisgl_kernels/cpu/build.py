"""Compiles kernels.cpp, or another source, for this machine at first use, and keeps the result.

Knows nothing of what the kernels compute. The library's name is a hash of all that it was made from: a changed source,
compiler or processor has another name. It is written beside its place and renamed, so two processes may build at once.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.cpp")
COMPILERS = ("c++", "g++", "clang++")
# Not -ffast-math: it lets the compiler assume that there is no NaN, and a NaN must reach the logits to be seen there.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")
NATIVE = ("-march=native", "-mcpu=native", "")  # what compilers and processors call "for this machine"; "": not known
CPU_FACTS = ("model name", "flags", "Features", "CPU part")  # lines of /proc/cpuinfo that decide what `native` means


class BuildError(Exception):
    """The kernels cannot be compiled here. The message says why and what to do."""


def build_library(extra_flags: tuple[str, ...] = (), source: Path | None = None) -> Path:
    """The shared library, compiled unless an equal one is kept.

    Args:
        extra_flags: of the compiler, after FLAGS.
        source: compiled in place of kernels.cpp; it names the library.

    Raises:
        BuildError: there is no compiler, it failed, or the folder cannot be written.
    """
    compiler = find_compiler()
    folder, name = cache_folder(), source.stem if source else "cpu"
    source = source or SOURCE
    errors = ""
    for native in NATIVE:
        command = [*compiler, *FLAGS, *filter(None, [native]), *extra_flags]
        library = folder / f"{name}-{_fingerprint(command, source)}.so"
        if library.exists():
            return library
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                output = Path(temporary) / library.name
                done = subprocess.run([*command, str(source), "-o", str(output)], capture_output=True, text=True)
                if done.returncode == 0:
                    output.replace(library)
                    return library
        except OSError as error:
            raise BuildError(f"cannot build in {folder}: {error}; choose another folder with MINISGL_HOME") from error
        errors = errors or f"{shlex.join(command)} failed:\n{done.stderr.strip()}"
    raise BuildError(errors)


def cache_folder() -> Path:
    """Where built libraries are kept: in $MINISGL_HOME, or in the platform's cache folder."""
    import platformdirs  # here, for minisgl to import with torch alone

    home = os.environ.get("MINISGL_HOME")
    return (Path(home).expanduser().absolute() if home else platformdirs.user_cache_path("minisgl")) / "kernels"


def find_compiler() -> list[str]:
    """The command of a C++ compiler: $CXX, which may carry flags, or the first of COMPILERS that is installed."""
    asked = shlex.split(os.environ.get("CXX", ""))
    for command in [asked] if asked else [[name] for name in COMPILERS]:
        if shutil.which(command[0]):
            return command
    if asked:
        raise BuildError(f"CXX={shlex.join(asked)} is not installed")
    raise BuildError(f"no C++ compiler ({', '.join(COMPILERS)}): install one, such as Debian's g++, or set CXX")


def _fingerprint(command: list[str], source: Path) -> str:
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True).stdout
    sources = [source, *sorted(source.parent.glob("*.h"))]
    machine = [platform.platform(), platform.processor(), _cpu_facts()]
    parts = [*(path.read_text() for path in sources), shlex.join(command), version, *machine]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu_facts() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return ""
    return "\n".join(sorted({line for line in lines if line.startswith(CPU_FACTS)}))
