"""Compiling CUDA sources with NVRTC, without a GPU: architectures, errors, the cache."""

from __future__ import annotations

import pytest
from minisgl_kernels.cuda import STEPS, build
from minisgl_kernels.cuda import compile as command
from minisgl_kernels.cuda.build import CompileError, compile_cuda, expand

ARCHITECTURES = {"sm_75": "f16", "sm_80": "bf16", "sm_90": "bf16", "sm_100": "float"}
SHAPES = {1: (80, 1), 2: (96, 3), 3: (64, 2), 4: (80, 4), 5: (256, 8), 6: (128, 2)}  # of each step: head_dim, group


def macros(dtype="f16", head_dim=64, group=2):
    return {"DTYPE": dtype, "HEAD_DIM": head_dim, "GROUP": group}


@pytest.fixture(autouse=True)
def nvrtc():
    try:
        build.nvrtc_version()
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"cuda-core with NVRTC is not installed: {error}")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("MINISGL_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "kernels"


@pytest.fixture
def in_place_of(tmp_path, monkeypatch):
    """Puts a text in place of one of our sources; returns its path."""

    def replace(name, text):
        path = tmp_path / f"readers_{name}"
        path.write_text(text)
        monkeypatch.setenv("MINISGL_CUDA_SOURCES", f"other.cu=/nowhere:{name}={path}")
        return path

    return replace


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("step", STEPS)
def test_every_step_compiles_for_every_architecture(step, arch):
    cubin = compile_cuda(STEPS[step], macros(ARCHITECTURES[arch], *SHAPES[step]), arch)

    assert cubin.startswith(b"\x7fELF")


@pytest.mark.parametrize(("dtype", "group"), [("float", 1), ("f16", 8), ("bf16", 4), ("bf16", 2)])
def test_the_backend_spills_no_register(dtype, group):
    found = command.resources(compile_cuda(STEPS[6], macros(dtype, 128, group), "sm_90"))
    if not found:
        pytest.skip("no cuobjdump")

    assert {name: stack for name, (_, stack, _) in found.items()} == {"decode": 0, "combine": 0}


def test_a_compile_error_shows_the_line(in_place_of, home):
    path = in_place_of("decode_6_split.cu", '// first\n#include "rows.cuh"\n\nint broken() {\n    return nothing;\n}\n')

    with pytest.raises(CompileError) as error:
        compile_cuda("decode_6_split.cu", macros(), "sm_80")

    assert "decode_6_split.cu does not compile for sm_80" in str(error.value)
    assert f'{path}:5: error: identifier "nothing" is undefined' in str(error.value)
    assert ">    5 |     return nothing;" in str(error.value)
    assert list(home.glob("*")) == []


def test_an_error_in_a_readers_header_shows_the_headers_line(in_place_of):
    text = build.source_path("warp.cuh").read_text()
    path = in_place_of("warp.cuh", text.replace("value += __shfl_xor_sync(", "value += shuffle("))

    with pytest.raises(CompileError) as error:
        compile_cuda("decode_3_warps.cu", macros(), "sm_80")

    line = next(n for n, part in enumerate(path.read_text().splitlines(), 1) if "value += shuffle(" in part)
    assert f'{path}:{line}: error: identifier "shuffle" is undefined' in str(error.value)


def test_a_file_included_twice_is_there_once():
    text = expand("decode_3_warps.cu")

    assert text.count("struct f16 {") == 1
    assert "#include" not in text


def test_an_unknown_source_is_an_error():
    with pytest.raises(FileNotFoundError, match="decode_7"):
        compile_cuda("decode_7.cu", {}, "sm_90")


@pytest.fixture
def compilations(monkeypatch):
    """What NVRTC is asked to compile: it answers with a text."""
    asked = []

    def nvrtc(name, text, macros, arch):
        asked.append((name, dict(macros), arch))
        return b"cubin"

    monkeypatch.setattr(build, "_nvrtc", nvrtc)
    return asked


def test_what_was_compiled_once_is_kept(home, compilations):
    first = compile_cuda(STEPS[1], macros(), "sm_80")

    assert compile_cuda(STEPS[1], macros(), "sm_80") == first == b"cubin"
    assert len(compilations) == len(list(home.iterdir())) == 1


@pytest.mark.parametrize("change", ["architecture", "macros", "source", "header", "compiler"])
def test_another_input_is_another_cubin(change, home, compilations, monkeypatch, in_place_of):
    compile_cuda(STEPS[3], macros(), "sm_80")
    name = {"source": STEPS[3], "header": "common.cuh"}.get(change)
    if name:
        in_place_of(name, build.source_path(name).read_text() + "\n// another\n")
    if change == "compiler":
        monkeypatch.setattr(build, "nvrtc_version", lambda: "99.0")

    compile_cuda(
        STEPS[3], macros(group=3 if change == "macros" else 2), "sm_90" if change == "architecture" else "sm_80"
    )

    assert len(compilations) == 2


def test_the_command_names_each_source_and_what_it_needs(capsys):
    assert command.main(["--arch", "sm_80", "--head-dim", "64"]) == 0

    printed = capsys.readouterr().out
    assert all(name in printed for name in STEPS.values())
    if command.resources(compile_cuda(STEPS[1], macros(), "sm_80")):
        assert "registers" in printed


def test_the_command_fails_with_a_source_that_does_not_compile(in_place_of, capsys):
    in_place_of(STEPS[2], "broken;")

    assert command.main(["--arch", "sm_80", "--head-dim", "64"]) == 1
    assert "broken;" in capsys.readouterr().err
