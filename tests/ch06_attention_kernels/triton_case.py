"""What the tests of both Triton tasks need: a compiler in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def compile_kernel(module: str, dtype: str, arch: str = "sm_75", **constants: int) -> str:
    """Compile a module's kernel for an architecture, with these constants in place of its own; returns Triton's IR.

    Fails with what the compiler says. Where Triton interprets it compiles nothing, so a child process does. It replaces
    the modules that this one does.
    """
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    if not (Path(triton.__file__).parent / "backends/nvidia/bin/ptxas").exists():
        pytest.skip("this Triton brings no ptxas")
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = ["-m", "chapters.replace", "tests.ch06_attention_kernels.compiled", module, arch, dtype]
    env = kept | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
    try:
        done = subprocess.run(
            [sys.executable, *command, json.dumps(constants)], env=env, capture_output=True, text=True, timeout=120
        )
    except subprocess.TimeoutExpired:
        why = "the compiler gave up: is a product written as a sum over [M, N, D]? use tl.dot"
        pytest.fail(why, pytrace=False)
    if done.returncode:
        pytest.fail(done.stderr, pytrace=False)
    return done.stdout
