"""Who may import whom, what needs torch, and how much code there may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import code_lines

ROOT = Path(__file__).parents[2]
MODULES = {
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__"): path
    for path in sorted((ROOT / "minisgl").rglob("*.py"))
}
# From the ground up. A module may import its own floor and those below.
FLOORS = [
    ("minisgl.core", "minisgl.config"),
    ("minisgl_kernels", "minisgl.distributed"),
    ("minisgl.layers", "minisgl.kvcache"),
    ("minisgl.scheduler",),
    ("minisgl.attention", "minisgl.models"),
    ("minisgl.simple", "minisgl.engine", "minisgl.message", "minisgl.tokenizer", "minisgl_hub"),
    ("minisgl.llm", "minisgl.server"),
    ("minisgl.cli",),
    ("minisgl", "minisgl.__main__"),  # the doors, which open everything
]
NO_TORCH = [
    "minisgl.core",
    "minisgl.config",
    "minisgl.cli",
    "minisgl.message.messages",
    "minisgl.tokenizer.answer",
    "minisgl.tokenizer.encode",
    "minisgl.tokenizer.stop",
    "minisgl.server.client",  # the process that answers HTTP never needs it
    "minisgl.server.stream",
    "minisgl.server.engine_process",  # until it is connected
    "minisgl.kvcache.pages",
    "minisgl.kvcache.radix_cache",
    "minisgl.kvcache.cache_manager",
    "minisgl.scheduler.policy",
    "minisgl.scheduler.scheduler",
]


def floor(module: str) -> int:
    """The floor of the longest prefix that a floor names."""
    named = [(len(name), i) for i, names in enumerate(FLOORS) for name in names if f"{module}.".startswith(f"{name}.")]
    return max(named)[1]


def imports(path: Path) -> set[str]:
    """Our own modules that a file imports when it is imported or later, but not those it needs for types only."""
    found: set[str] = set()
    stack: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            own = {f"{node.module}.{alias.name}" for alias in node.names} & set(MODULES)
            found |= own or {node.module}
        stack += ast.iter_child_nodes(node)
    return {name for name in found if name.split(".")[0].startswith("minisgl")}


@pytest.mark.parametrize("module", MODULES)
def test_no_module_imports_from_a_higher_floor(module):
    above = {name for name in imports(MODULES[module]) if floor(name) > floor(module)}
    assert above == set()


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith(("minisgl.scheduler", "minisgl.kvcache"))])
def test_scheduler_and_cache_know_no_model(module):
    assert not any(name.startswith(("minisgl.models", "minisgl.layers")) for name in imports(MODULES[module]))


def test_what_plans_and_counts_is_imported_without_torch():
    code = (
        f"import sys, {', '.join(NO_TORCH)}; print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)

    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize(("of_the_server", "most"), [(False, 3_500), (True, 1_900)], ids=["engine", "server"])
def test_engine_and_server_stay_small(of_the_server, most):
    lines = {
        module: code_lines(path)
        for module, path in MODULES.items()
        if module.startswith(("minisgl.server", "minisgl.message")) is of_the_server
    }

    assert sum(lines.values()) < most, lines


def test_a_line_of_code_is_neither_blank_nor_comment_nor_docstring(tmp_path):
    file = tmp_path / "a.py"
    file.write_text(
        '"""Doc.\n\nMore."""\n\n# why\nx = """a\n\nb"""  # three lines\n\n\ndef f():\n    """Doc."""\n    return x\n'
    )

    assert code_lines(file) == 3 + 1 + 1
