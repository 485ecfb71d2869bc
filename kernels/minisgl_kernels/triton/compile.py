"""Compile every Triton kernel of this package ahead, without a GPU or driver.

    python -m minisgl_kernels.triton.compile --arch sm_75 sm_80 sm_90

Triton compiles a kernel when it is first launched, so a mistake that only its compiler sees would otherwise wait for a
GPU. Each module lists what to compile as COMPILE_CASES. Says nothing of results: the interpreter computes those.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # its default, said aloud: Triton 3.9 warns otherwise

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from minisgl_kernels import triton as package
from minisgl_kernels.triton.cases import CompileCase


def all_cases() -> list[CompileCase]:
    """The COMPILE_CASES of every module of the package."""
    modules = [importlib.import_module(f"{package.__name__}.{info.name}") for info in _modules()]
    return [case for module in modules for case in getattr(module, "COMPILE_CASES", [])]


def compile_case(case: CompileCase, sm: int) -> Any:
    """Compile for an architecture, 90 for sm_90; returns Triton's compiled kernel, whose asm["cubin"] runs there.

    Raises:
        ValueError: types and constants are not the kernel's arguments.
        Exception: whatever Triton or ptxas raises for a kernel that does not compile.
    """
    names = case.kernel.arg_names
    constants = {p.name: p.default for p in case.kernel.params if p.has_default} | case.constants
    if sorted(names) != sorted([*case.types, *constants]):
        wrong = set(names) ^ {*case.types, *constants}
        raise ValueError(f"{case.name}: arguments without a type or types without an argument: {', '.join(wrong)}")
    signature = {name: case.types.get(name, "constexpr").removesuffix("/16") for name in names}
    aligned = [i for i, name in enumerate(names) if re.match(r"\*|.*/16", case.types.get(name, ""))]
    source = ASTSource(case.kernel, signature, constants, attrs={(i,): [["tt.divisibility", 16]] for i in aligned})
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


def resources(compiled: Any) -> str:
    """Registers a thread, bytes spilled to local memory and bytes of shared memory, as far as they are known."""
    found = [f"{compiled.metadata.shared:,} B shared"]
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if tool.exists():
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder) / "kernel.cubin"
            cubin.write_bytes(compiled.asm["cubin"])
            listing = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True).stdout
        found = [f"{n} {what}" for key, what in (("REG", "registers"), ("STACK", "B spilled"))
                 for n in re.findall(rf"{key}:(\d+)", listing)[:1]] + found  # fmt: skip
    return ", ".join(found)


def main(arguments: list[str] | None = None) -> int:
    """Compile for each architecture; returns 1 if a kernel does not compile, having named it."""
    parser = argparse.ArgumentParser(prog="python -m minisgl_kernels.triton.compile", description=__doc__)
    parser.add_argument("--arch", nargs="+", default=["sm_80", "sm_90"], help="such as sm_75 sm_90")
    parser.add_argument("--only", default="", help="compile kernels whose name contains this")
    options = parser.parse_args(arguments)
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set: nothing would be compiled")
    cases = [case for case in all_cases() if options.only in case.name]
    failed = 0
    for arch in options.arch:
        sm = int(arch.removeprefix("sm_"))
        for case in cases:
            if not case.runs_on(sm):
                continue
            try:
                print(f"{arch}  {case.name}: {resources(compile_case(case, sm))}", flush=True)
            except Exception as error:  # of any kind: the compiler's, ptxas's or the description's
                failed += 1
                print(f"{arch}  {case.name}: does not compile\n{_told(error)}", file=sys.stderr, flush=True)
    return 1 if failed or not cases else 0


def _told(error: BaseException | None) -> str:
    """An error and those it came from: that of a function which a kernel calls is the last."""
    told = []
    while error:
        told.append(str(error))
        error = error.__cause__ or error.__context__
    return "\n".join(told)


def _modules() -> list[pkgutil.ModuleInfo]:
    return [info for info in pkgutil.iter_modules(package.__path__) if info.name != "compile"]


if __name__ == "__main__":
    raise SystemExit(main())
