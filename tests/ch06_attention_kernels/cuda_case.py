"""What the tests of both CUDA tasks need: a GPU, or a C++ compiler for the emulator."""

from __future__ import annotations

import pytest
import torch
from minisgl_kernels import cuda
from minisgl_kernels.cpu.build import BuildError, find_compiler

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


def compile_source(name: str, arch: str, macros: dict[str, str | int]) -> None:
    """Compile a source with NVRTC, which needs no GPU; a CompileError shows the line."""
    pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    try:
        cuda.build.nvrtc_version()
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"NVRTC is not installed: {error}")
    assert cuda.build.compile_cuda(name, macros, arch)
