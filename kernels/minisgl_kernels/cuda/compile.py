"""Compile every step of the ladder ahead, without a GPU, driver or toolkit.

    python -m minisgl_kernels.cuda.compile --arch sm_75 sm_80 sm_90 sm_100

Prints registers a thread, bytes spilled and shared memory where Triton's package brings cuobjdump. Says nothing of
results: the emulator and a GPU compute those.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from minisgl_kernels.cuda import DTYPES, STEPS
from minisgl_kernels.cuda.build import CompileError, compile_cuda

_RESOURCES = re.compile(r"Function (\w+):.*?REG:(\d+) STACK:(\d+) SHARED:(\d+)", re.DOTALL)


def resources(cubin: bytes) -> dict[str, tuple[int, int, int]]:
    """By kernel: registers a thread, bytes of stack (spilled, or indexed at run time) and bytes of shared memory.

    Empty where there is no cuobjdump.
    """
    package = importlib.util.find_spec("triton")
    tool = Path(package.origin).parent / "backends/nvidia/bin/cuobjdump" if package and package.origin else None
    if tool is None or not tool.exists():
        return {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        listing = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True).stdout
    return {name: (int(regs), int(stack), int(shared)) for name, regs, stack, shared in _RESOURCES.findall(listing)}


def main(arguments: list[str] | None = None) -> int:
    """Compile for each architecture; returns 1 if a source does not compile, having said why."""
    parser = argparse.ArgumentParser(prog="python -m minisgl_kernels.cuda.compile", description=__doc__)
    parser.add_argument("--arch", nargs="+", default=["sm_75", "sm_80", "sm_90", "sm_100"], help="such as sm_75 sm_90")
    parser.add_argument("--dtype", nargs="+", default=["f16"], choices=DTYPES.values(), help="of q, K and V")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--group", type=int, default=2, help="query heads that share a KV head")
    options = parser.parse_args(arguments)
    failed = 0
    for arch in options.arch:
        for dtype in options.dtype:
            macros = {"DTYPE": dtype, "HEAD_DIM": options.head_dim, "GROUP": options.group}
            for name in STEPS.values():
                try:
                    found = resources(compile_cuda(name, macros, arch))
                except CompileError as error:
                    failed += 1
                    print(error, file=sys.stderr, flush=True)
                    continue
                needs = [
                    f"{kernel} {r} registers, {s} B of stack, {m:,} B shared" for kernel, (r, s, m) in found.items()
                ]
                print(f"{arch}  {name} {dtype}: {'; '.join(needs) or 'compiled'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
