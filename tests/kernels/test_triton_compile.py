"""Every Triton kernel compiles for the GPUs that the course names, on a machine that has none of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import minisgl_kernels
import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")

KERNELS = Path(minisgl_kernels.__file__).parents[1]
PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin"

# A module with a kernel that compiles, one whose body does not, and one described without its last argument.
BROKEN = """
import triton, triton.language as tl
from minisgl_kernels.triton import compile
from minisgl_kernels.triton.cases import CompileCase

@triton.jit
def sound_kernel(x_ptr, n):
    tl.store(x_ptr + n, 1.0)

@triton.jit
def unsound_kernel(x_ptr, n):
    tl.store(x_ptr + tl.arange(0, 3), 1.0)  # no power of two

types = {"x_ptr": "*fp32", "n": "i32"}
compile.all_cases = lambda: [CompileCase(kernel, types) for kernel in (sound_kernel, unsound_kernel)] + [
    CompileCase(sound_kernel, {"x_ptr": "*fp16"})
]
raise SystemExit(compile.main(["--arch", "sm_80"]))
"""


# Prints what of each kernel's arguments Triton would compile anew: an array of integers, such as a row of a packed
# tensor, for where it begins; a number that is not the model's, for being 1 or a multiple of 16.
VARIANTS = """
from minisgl_kernels.triton.compile import all_cases
seen = set()
for case in all_cases():
    for param in case.kernel.params:
        kind = case.types.get(param.name, "")
        fixed = {"*i64": param.do_not_specialize_on_alignment, "i32": param.do_not_specialize}
        if kind in fixed:
            seen.add(case.kernel.__name__)
        if not fixed.get(kind, True):
            print(case.kernel.__name__, param.name)
print("looked at", *sorted(seen))
"""


def run(*arguments, **env):
    """Python in an environment where Triton compiles."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    kept |= {"PYTHONPATH": os.pathsep.join([str(KERNELS), *sys.path]), "PYTHONWARNINGS": "ignore"} | env
    return subprocess.run([sys.executable, *arguments], env=kept, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_100"])
def test_every_kernel_compiles(arch):
    if not PTXAS.exists():
        pytest.skip("this Triton brings no ptxas")
    if arch == "sm_100" and not (PTXAS / "ptxas-blackwell").exists():
        pytest.skip("this Triton's ptxas is older than sm_100")

    done = run("-m", "minisgl_kernels.triton.compile", "--arch", arch)

    assert done.returncode == 0, done.stderr
    for kernel in ("add_rms_norm", "qk_norm_rope_store", "silu_and_mul", "embedding"):
        assert f"{arch}  {kernel}_kernel[" in done.stdout
    assert ("bf16" in done.stdout) == (arch != "sm_75")  # the T4 has no bfloat16
    if arch == "sm_75":  # nor more than 64 KB of shared memory for a program
        shared = [int(size.replace(",", "")) for size in re.findall(r"([\d,]+) B shared", done.stdout)]
        assert max(shared) <= 65_536


def test_where_a_batch_lies_and_how_large_it_is_compiles_nothing_anew():
    done = run("-c", VARIANTS)

    assert done.returncode == 0, done.stderr
    *variants, kernels = done.stdout.splitlines()
    assert not variants
    for kernel in ("decode_kernel", "flash_kernel", "qk_norm_rope_store_kernel", "embedding_kernel", "product_kernel"):
        assert kernel in kernels


def test_what_does_not_compile_is_named_and_the_rest_goes_on(tmp_path):
    script = tmp_path / "broken.py"  # Triton reads the source of a kernel from its file
    script.write_text(BROKEN)

    done = run(str(script))

    assert done.returncode == 1
    assert "sound_kernel[fp32]: " in done.stdout
    assert "sm_80  unsound_kernel[fp32]: does not compile" in done.stderr
    assert "sound_kernel[fp16]: does not compile" in done.stderr
    assert "types without an argument: n" in done.stderr


def test_nothing_is_compiled_in_the_interpreter():
    done = run("-m", "minisgl_kernels.triton.compile", TRITON_INTERPRET="1")

    assert done.returncode == 2
    assert "TRITON_INTERPRET is set" in done.stderr
