"""What the tests of both Triton tasks need: the module, and a compiler in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def compile_kernel(name: str, arch: str) -> None:
    """Compile the kernels whose name contains this for an architecture; fails with what the compiler says.

    Where Triton interprets it compiles nothing, so a child process does. It replaces the modules that this one does.
    """
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    if not (Path(triton.__file__).parent / "backends/nvidia/bin/ptxas").exists():
        pytest.skip("this Triton brings no ptxas")
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = ["-m", "chapters.replace", "minisgl_kernels.triton.compile", "--arch", arch, "--only", name]
    env = kept | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
