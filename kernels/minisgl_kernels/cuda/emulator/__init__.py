"""Runs the CUDA sources on a CPU: see emulator.h for what it finds that a GPU rarely shows.

The host's C++ compiler builds a source together with the emulator; the library is kept like the other CPU kernels.
"""

from __future__ import annotations

import ctypes
import functools
import tempfile
from pathlib import Path

from minisgl_kernels.cpu.build import build_library
from minisgl_kernels.cuda.build import Macros, expand

_HEADER = Path(__file__).with_name("emulator.h")
_ENTRY = """
static void (*emulated)(const ARGS);
extern "C" const char* emulate(void (*kernel)(const ARGS), const ARGS* args, const unsigned* grid, unsigned threads,
                               unsigned dynamic, bool together, unsigned seed) {
    emulated = kernel;
    auto body = [](const void* args) { emulated(*static_cast<const ARGS*>(args)); };
    return emulator::launch(body, args, {grid[0], grid[1], grid[2]}, threads, dynamic, together, seed);
}
"""


def launch(
    name: str, macros: Macros, entry: str, grid: tuple[int, int, int], threads: int, args: ctypes.Structure,
    seed: int = 0, *, dynamic: int = 0, together: bool = False,
) -> None:  # fmt: skip
    """Run one kernel of a source, as driver.Kernel.launch does on a GPU.

    Args:
        name, macros, entry: the source, what to define in it, and its kernel.
        grid: blocks in x, y and z.
        threads: of a block.
        args: addresses of CPU memory, in a struct of the kernel's own name for it.
        seed: of the order in which threads run and copies land.
        dynamic: bytes of dynamic shared memory of a block.
        together: all blocks are there at once, as a kernel needs whose blocks wait for each other.

    Raises:
        BuildError: there is no C++ compiler, or it does not accept the source.
        RuntimeError: the threads of a warp wait for each other in different places, or blocks wait for ever.
    """
    header = f'#line 1 "{_HEADER.as_posix()}"\n{_HEADER.read_text()}'
    text = "\n".join([header.replace("#pragma once", ""), expand(name), _ENTRY.replace("ARGS", type(args).__name__)])
    library = _load(Path(name).stem, text, tuple(sorted(macros.items())))
    sizes = ((ctypes.c_uint * 3)(*grid), threads, dynamic, together, seed)
    error = library.emulate(getattr(library, entry), ctypes.byref(args), *sizes)
    if error:
        raise RuntimeError(f"{name}: {error.decode()}")


@functools.cache
def _load(stem: str, text: str, macros: tuple[tuple[str, str | int], ...]) -> ctypes.CDLL:
    flags = ("-O1", "-Wno-narrowing", *(f"-D{macro}={value}" for macro, value in macros))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / f"{stem}.cpp"
        source.write_text(text)
        library = ctypes.CDLL(str(build_library(flags, source)))
    library.emulate.restype = ctypes.c_char_p
    unsigned = ctypes.c_uint
    library.emulate.argtypes = [*[ctypes.c_void_p] * 3, unsigned, unsigned, ctypes.c_bool, unsigned]
    return library
