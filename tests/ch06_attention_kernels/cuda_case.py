"""What the tests of both CUDA tasks need: a GPU, or a C++ compiler for the emulator."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from minisgl_kernels import cuda
from minisgl_kernels.cpu.build import BuildError, find_compiler
from minisgl_kernels.cuda import driver

SOURCES = "MINISGL_CUDA_SOURCES"
on_gpu = torch.cuda.is_available()


def require() -> None:
    """Skip where the CUDA sources cannot run."""
    if on_gpu:
        if reason := cuda.why_unavailable(torch.device("cuda"), torch.float32):
            pytest.skip(reason, allow_module_level=True)
        return
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(f"the emulator needs a C++ compiler: {error}", allow_module_level=True)


@contextlib.contextmanager
def only_the_compilers_words() -> Iterator[None]:
    """Fail with what the host's compiler says of a source, without our traceback."""
    try:
        yield
    except BuildError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None


def launch(probe: str, macros: dict[str, str | int], args: driver.Args, monkeypatch, seed: int = 0) -> None:
    """Run one block of probe.cu or overlap.cu of this folder, whose kernel has the name of the file."""
    others = os.environ.get(SOURCES, "")
    own = f"{probe}.cu={Path(__file__).with_name(probe + '.cu')}"
    monkeypatch.setenv(SOURCES, os.pathsep.join(filter(None, [others, own])))
    with only_the_compilers_words():
        place = torch.device("cuda" if on_gpu else "cpu")
        cuda._launch(f"{probe}.cu", tuple(macros.items()), probe, (1, 1, 1), args, place, seed)


def compile_source(name: str, arch: str, macros: dict[str, str | int]) -> None:
    """Compile a source with NVRTC, which needs no GPU; a CompileError shows the line."""
    pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    try:
        cuda.build.nvrtc_version()
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"NVRTC is not installed: {error}")
    assert cuda.build.compile_cuda(name, macros, arch)
