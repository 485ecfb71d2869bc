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
from minisgl_kernels.cuda.driver import Args

_HEADER = Path(__file__).with_name("emulator.h")
_ENTRY = """
static void (*emulated)(const Args);
extern "C" const char* emulate(void (*kernel)(const Args), const Args* args, const unsigned* grid, unsigned threads,
                               unsigned seed) {
    emulated = kernel;
    auto body = [](const void* args) { emulated(*static_cast<const Args*>(args)); };
    return emulator::launch(body, args, {grid[0], grid[1], grid[2]}, threads, seed);
}
"""


def launch(
    name: str, macros: Macros, entry: str, grid: tuple[int, int, int], threads: int, args: Args, seed: int = 0
) -> None:
    """Run one kernel of a source, as driver.Kernel.launch does on a GPU.

    Args:
        name, macros, entry: the source, what to define in it, and its kernel.
        grid: blocks in x, y and z.
        threads: of a block.
        args: addresses of CPU memory.
        seed: of the order in which threads run and copies land.

    Raises:
        BuildError: there is no C++ compiler, or it does not accept the source.
        RuntimeError: the threads of a warp wait for each other in different places.
    """
    header = f'#line 1 "{_HEADER.as_posix()}"\n{_HEADER.read_text()}'
    text = "\n".join([header.replace("#pragma once", ""), expand(name), _ENTRY])
    library = _load(Path(name).stem, text, tuple(sorted(macros.items())))
    error = library.emulate(getattr(library, entry), ctypes.byref(args), (ctypes.c_uint * 3)(*grid), threads, seed)
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
    library.emulate.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    return library
