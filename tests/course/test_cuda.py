"""Tasks in CUDA C++: the same machine as for Python, on text that no compiler is needed for."""

from __future__ import annotations

import os
from io import StringIO

import pytest
from rich.console import Console

from chapters import cuda_source, macros, progress, runs, workspace
from chapters.__main__ import main
from chapters.check import check
from chapters.manifest import CourseError, load_chapters
from chapters.mutants import mutate
from chapters.stubs import code_lines, stub
from chapters.symbols import UnknownSymbol, find

SOURCE = """\
// Small sums, on a GPU.
#pragma once
#define BROKEN { twice(x) \\
  } }

// Twice x. A brace in a comment: }
// Its value is T's.
template <typename T>
__device__ __forceinline__ T twice(T x) {
    // the trick
    const char* text = "{ \\" }"; const char brace = '{';
    return x + x;  /* } */
}

__device__ int add(int a, int b);

extern "C" __global__ void both(const int *in, int* out,
                                int n /* elements */) {
    if (n) {
        *out = twice(*in) + add(1, 2);
    }
}

struct Pair {
    int a, b;
};
/* Adds. */
__device__ int add(int a, int b)
{
    return a + b;
}
__device__ int one() { return 1; }
"""

# As a compiler would: it reads the file that stands for ring.cuh, prints #error lines, and "runs" twice and add.
COMPILER = """\
import os, re, subprocess, sys
from pathlib import Path

def text():
    entries = filter(None, os.environ.get("MINISGL_CUDA_SOURCES", "").split(os.pathsep))
    sources = dict(entry.split("=", 1) for entry in entries)
    return Path(sources.get("ring.cuh", Path(__file__).with_name("ring.cuh"))).read_text(encoding="utf-8")

def call(name, **arguments):
    source = text()
    if error := re.search(r"^ *#error .*", source, re.M):
        raise RuntimeError(f"compilation log:\\n(3): {error[0]}\\n")
    body = re.search(name + r"\\([^)]*\\)\\s*\\{.*?return ([^;]*);", source, re.S)[1]
    return eval(body, arguments)

def call_in_a_child(name, **arguments):
    code = f"from toy.compiler import call; print(call({name!r}, **{arguments}))"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
"""

FILES = {
    "toy/ring.cuh": SOURCE,
    "toy/compiler.py": COMPILER,
    "chapters/20_ring/chapter.yml": """\
title: Ring
minutes: 5
tier: cpu
tasks:
  - {id: "20.1", title: Double, symbol: "toy.ring:twice", lines: 2, hints: [a, b],
     tests: [tests/ch20_ring/test_twice.py]}
  - {id: "20.2", title: Add, symbol: "toy.ring:add", lines: 1, hints: [a, b], tests: [tests/ch20_ring/test_add.py]}
""",
    "chapters/20_ring/mutants.yml": """\
- {task: "20.1", why: Squares., symbol: "toy.ring:twice", replace: x + x, with: x * x}
- {task: "20.2", why: Subtracts., symbol: "toy.ring:add", replace: a + b, with: a - b}
""",
    "chapters/20_ring/index.md": '{{ task("20.1") }}{{ solution("20.1") }}{{ task("20.2") }}{{ solution("20.2") }}',
    "tests/ch20_ring/test_twice.py": (
        "from toy.compiler import call, call_in_a_child\n\n\n"
        'def test_twice():\n    assert call("twice", x=3) == 6\n\n\n'
        'def test_twice_in_a_child():\n    assert call("twice", x=3) == call_in_a_child("twice", x=3) == 6\n'
    ),
    "tests/ch20_ring/test_add.py": (
        'from toy.compiler import call\n\n\ndef test_add():\n    assert call("add", a=1, b=2) == 3\n'
    ),
}
MINE = "workspace/ch20/ring.cuh"
GAP = "#error 20.1 Double: see chapters/20_ring"


@pytest.fixture
def course(root):
    """The toy course with a chapter 20, whose tasks are in a CUDA file."""
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


@pytest.fixture
def chapter(course):
    return load_chapters(course)[-1]


def test_a_function_is_found_with_its_template_line_and_the_comment_above_it(course):
    symbol = find(course, "toy.ring:twice")

    assert symbol.path.as_posix() == "toy/ring.cuh"
    assert symbol.place.line == 8
    assert symbol.source.startswith("// Twice x. A brace in a comment: }\n// Its value")
    assert symbol.source.endswith("return x + x;  /* } */\n}")
    assert symbol.head.endswith("T twice(T x) {")


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("both", 'extern "C" __global__ void both(const int *in, int* out,', "}"),
        ("add", "/* Adds. */", "}"),  # not where it is declared, nor where it is called
        ("one", "__device__ int one() { return 1; }", "__device__ int one() { return 1; }"),
    ],
)
def test_declarations_calls_macros_and_neighbours_do_not_mislead(course, name, first, last):
    lines = find(course, f"toy.ring:{name}").source.split("\n")

    assert (lines[0], lines[-1]) == (first, last)


def test_an_unknown_function_or_file_is_named(course):
    with pytest.raises(UnknownSymbol, match=r"toy/ring\.cuh defines no 'thrice'"):
        find(course, "toy.ring:thrice")
    with pytest.raises(UnknownSymbol, match=r"there is no toy/rung\.py, nor a \.cu or \.cuh"):
        find(course, "toy.rung:twice")


def test_a_stub_replaces_the_bodies_by_lines_that_every_compiler_prints(course, chapter):
    expected = SOURCE
    for body, gap in {
        SOURCE[SOURCE.index("    // the trick") : SOURCE.index("}\n\n__device__ int add")]: f"    {GAP}\n",
        "    return a + b;\n": "    #error 20.2 Add: see chapters/20_ring\n",
    }.items():
        expected = expected.replace(body, gap)

    assert stub(course, chapter, "toy.ring") == expected


def test_code_lines_count_no_comments(course, chapter):
    assert [code_lines(course, task) for task in chapter.tasks] == [2, 1]


def test_a_function_on_one_line_cannot_be_a_task(course, edit):
    edit("chapters/20_ring/chapter.yml", "toy.ring:add", "toy.ring:one")

    with pytest.raises(CourseError, match=r"task 20\.2: toy\.ring:one has no body on lines of its own"):
        stub(course, load_chapters(course)[-1], "toy.ring")


def test_a_mutant_is_one_edit_of_the_text(course, chapter):
    assert mutate(course, chapter.mutants[0]) == SOURCE.replace("x + x", "x * x")


def test_a_mutant_that_leaves_a_bracket_open_is_refused(course, edit):
    edit("chapters/20_ring/mutants.yml", "with: a - b", "with: (a - b")

    with pytest.raises(CourseError, match=r"it is not C\+\+: line 31: '}' closes nothing"):
        mutate(course, load_chapters(course)[-1].mutants[1])


def test_the_readers_file_keeps_its_suffix(course, capsys):
    assert main(["start", "20"], course) == 0

    assert GAP in (course / MINE).read_text(encoding="utf-8")
    assert f"20.1  Double: twice in {MINE}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("T twice(T x)", "T twice(T y)", r"ring.cuh:8: twice takes \(T y\), .* with \(T x\)"),
        (
            "int a, int b)\n",
            "int* a, const char (&b)[4])\n",
            r"add takes \(int\* a, const char \(&b\)\[4\]\), .* with \(int a, int b\)",
        ),
        ("T twice", "T thrice", r"there is no twice any more; task 20.1 is the body of twice\(T x\)"),
        ("    if (n) {", "    if (n) ", r"workspace/ch20/ring.cuh:20: syntax error: '}' closes nothing"),
        ("    if (n) {", "    if (n) {{", r"workspace/ch20/ring.cuh:16: syntax error: '{' is never closed"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_in_one_line(course, chapter, edit, old, new, message):
    workspace.start(course, chapter)
    edit(MINE, old, new)

    with pytest.raises(CourseError, match=message) as caught:
        workspace.own_files(course, chapter)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "state"),
    [
        (GAP, "return x;", "changed"),
        ("#error 20.2 Add: see chapters/20_ring", "return 0;", "done"),  # another task's body
        ("// Small sums, on a GPU.", "// Sums.\n", "done"),
        ("const int *in", "const int* in", "done"),
        ("add(1, 2)", "add(1, 3)", "changed"),
    ],
)
def test_a_result_is_stale_once_code_outside_other_tasks_changes(course, chapter, edit, old, new, state):
    workspace.start(course, chapter)
    progress.record(course, {"20.1": "done"}, workspace.digests(course, chapter))

    edit(MINE, old, new)

    assert progress.states(course, chapter)["20.1"] == state


def test_the_tests_compile_the_readers_file_in_child_processes_too(course, chapter, edit, python):
    workspace.start(course, chapter)
    edit(MINE, GAP, "return 2 * x;")
    edit(MINE, "#error 20.2 Add: see chapters/20_ring", "return b + a;")

    out, status = python("-m", "pytest", "--mine", "tests/ch20_ring")

    assert status == 0
    assert f"mine: {MINE} in place of toy.ring" in out
    assert list(progress.states(course, chapter).values()) == ["done", "done"]

    edit(MINE, "return 2 * x;", "return 3 * x;")
    out, _ = python("-m", "pytest", "--mine", "tests/ch20_ring", "-k", "child")
    assert "assert 9 == 6" in out


def test_a_compilers_error_that_carries_the_tasks_message_is_one_line(course, chapter, python):
    workspace.start(course, chapter)

    out, status = python("-m", "pytest", "--mine", "tests/ch20_ring/test_twice.py::test_twice")

    assert status == 1
    assert f"\n{MINE}:10: {GAP}\n" in out
    assert "compilation log" not in out


def test_the_engine_runs_with_the_readers_file(course, chapter, edit, python):
    (course / "minisgl").mkdir()
    (course / "minisgl" / "__init__.py").touch()
    (course / "minisgl" / "cli.py").write_text(
        'from toy.compiler import call\n\n\ndef main(argv):\n    print(call("twice", x=3))\n', encoding="utf-8"
    )
    workspace.start(course, chapter)
    edit(MINE, GAP, "return 50 * x;")
    edit(MINE, "#error 20.2 Add: see chapters/20_ring", "return b + a;")
    code = "import sys; from pathlib import Path; from chapters.__main__ import main; sys.exit(main(root=Path.cwd()))"

    out, status = python("-c", code, "run", "20", "chat")

    assert sorted(out.splitlines()) == ["150", f"{MINE} in place of toy.ring"]
    assert status == 0


def test_check_tries_stubs_and_wrong_answers_and_wants_one_task_a_file(course, chapter, monkeypatch):
    monkeypatch.setattr(runs, "PRELOAD", ["pytest", "hypothesis"])
    screen = StringIO()

    assert not check(course, [chapter], Console(file=screen, width=200))

    line, *problems = screen.getvalue().splitlines()
    assert line == "20 ring  stubs: 2 of 2 fail with our message · final modules pass · mutants: 2 of 2 caught"
    assert problems[0] == "   ✗ with the tasks up to 20.1: tests fail"  # nothing compiles beside the gap of 20.2
    assert "MINISGL_CUDA_SOURCES" not in os.environ


def test_pages_and_the_command_line_show_cpp(course, monkeypatch, capsys):
    monkeypatch.setattr(macros, "ROOT", course)

    assert macros.code("toy.ring:add").startswith('````cpp title="toy/ring.cuh:27"\n/* Adds. */\n')
    assert "T twice(T x) {\n        ...\n    }\n" in macros.task("20.1")
    assert "the trick" not in macros.task("20.1")
    assert "return x + x;" in macros.solution("20.1")

    main(["solution", "20.1"], course)
    assert "toy/ring.cuh:6" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text", ["// it's\nint f() {\n}\n", "#error don't (\nint f() {\n}\n", "int x = 1'000'000; // {\n"]
)
def test_apostrophes_do_not_hide_brackets(text):
    cuda_source.check(text, "text.cu")
