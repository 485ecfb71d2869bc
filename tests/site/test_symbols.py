"""What the prose names exists: every path, symbol, flag, target and variable of ours in an inline code span.

Found by the source's text alone. A span is checked when its form says that it is ours; what could be another project's,
a reader's variable or an idea is left alone. Of tables that set our names beside those of other engines, the first
column is ours and the rest is not read.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "minisgl": "",
    "minisgl_kernels": "kernels",
    "minisgl_hub": "hub",
    "benchmarks": "",
    "chapters": "",
    "tests": "",
}
FOLDERS = ("minisgl", "kernels", "hub", "benchmarks", "chapters", "notebooks", "scripts", "tests")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "chapters").glob("**/*.md"))]
PAGES += sorted((ROOT / "notebooks").glob("*.ipynb"))
OTHERS = re.compile(r"SGLang|vLLM|nano-vllm|docker")
VARIABLES = {  # as pages and code call an object of these classes
    "batch": ("Batch", "ForwardBatch"),
    "completion": ("Completion",),
    "config": ("EngineConfig", "ModelConfig"),
    "llm": ("LLM",),
    "request": ("Request",),
}

_FENCE = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2`*$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)")
_PATH = re.compile(rf"(?:{'|'.join(FOLDERS)})/[\w./-]*")
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+")
_COMMAND = re.compile(r"(?:minisgl|pytest|python -m (?:chapters|benchmarks)\S*)(?= |$)")


@dataclass
class Names:
    """What a module or a class defines, by name; what lies within a class in its turn."""

    members: dict[str, Names | None] = field(default_factory=dict)
    bases: list[str] = field(default_factory=list)


class Span(NamedTuple):
    """Inline code, and what stands around it."""

    text: str
    ours: bool = False  # in the column of a comparison that is ours
    of_others: bool = False  # on a line that speaks of another program


def spans(path: Path) -> Iterator[Span]:
    """The inline code of a page or of a notebook's prose, in its order."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = (cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown")
        text = "\n\n".join("".join(cell["source"]) for cell in cells)
    comparing = False
    for line in _FENCE.sub("", text).split("\n"):
        row = line.lstrip().startswith("|")
        comparing = row and (comparing or bool(OTHERS.search(line) and "here" in line.lower()))
        read = re.split(r"(?<!\\)\|", line.lstrip(), maxsplit=2)[1] if comparing else line
        for _, span in _SPAN.findall(read):
            if "{{" not in span:  # what a macro fills in
                yield Span(span.strip(), comparing, not comparing and bool(OTHERS.search(line)))


@cache
def modules() -> dict[str, Names]:
    """Each of our modules by its dotted name."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted((ROOT / folder / package).rglob("*.py")):
            dotted = ".".join(path.relative_to(ROOT / folder).with_suffix("").parts).removesuffix(".__init__")
            found[dotted] = _names(ast.parse(path.read_text(encoding="utf-8")).body)
        for path in sorted((ROOT / folder / package).rglob("*.cu*")):  # CUDA C++: its functions by their text
            dotted = ".".join(path.relative_to(ROOT / folder).with_suffix("").parts)
            words = re.findall(r"\b(\w+)\(", path.read_text(encoding="utf-8"))
            found.setdefault(dotted, Names()).members |= dict.fromkeys(words)
    return found


def _names(body: list[ast.stmt]) -> Names:
    names = Names()
    for node in body:
        if isinstance(node, ast.ClassDef):
            names.members[node.name] = inner = _names(node.body)
            inner.bases = [ast.unparse(base).rpartition(".")[2].partition("[")[0] for base in node.bases]
            for part in ast.walk(node):  # self.x = … anywhere in it
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and _is_self(part.value):
                    inner.members.setdefault(part.attr, None)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.members[node.name] = None
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.members |= dict.fromkeys(a.asname or a.name.partition(".")[0] for a in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            stored = (part for target in targets for part in ast.walk(target))
            names.members |= dict.fromkeys(part.id for part in stored if isinstance(part, ast.Name))
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.For):
            for part in (node.body, getattr(node, "orelse", [])):
                names.members |= _names(part).members
    return names


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


@cache
def classes() -> dict[str, list[Names]]:
    """Each of our classes by its name; one name may be several classes."""
    found: dict[str, list[Names]] = {}
    for module, names in modules().items():
        for name, inner in names.members.items():
            if inner is not None and not module.startswith("tests"):
                found.setdefault(name, []).append(inner)
    return found


def has(name: str, member: str, seen: tuple[str, ...] = ()) -> bool:
    """Whether one of our classes of this name, or one above it, has this member."""
    for names in classes().get(name, ()):
        above = (base for base in names.bases if base not in seen)
        if member in names.members or any(has(base, member, (*seen, name)) for base in above):
            return True
    return False


def why_no_symbol(span: str, ours: bool = False) -> str:
    """Why a dotted name is not one of ours; empty if it is, or if its form does not claim to be."""
    parts = span.split(".")
    if parts[0] in PACKAGES:
        return _why_not_in(span, parts)
    owners = VARIABLES.get(parts[0], (parts[0],) if parts[0] in classes() else ())
    if parts[0] == "self":
        owners = tuple(classes())
    if owners and span != "config.json" and (parts[0][0].isupper() or not parts[1][0].isupper()):
        known = any(has(owner, parts[1]) for owner in owners)
        return "" if known else f"no {' or '.join(owners[:2])} has {parts[1]}"
    homes = [name for name in modules() if f".{name}".endswith(f".{parts[0]}")]
    if homes and (ours or parts[1][0].isupper()):  # module.Class or module.CONSTANT; a variable's attributes are small
        reasons = [_why_not_in(span, [*home.split("."), *parts[1:]]) for home in homes]
        return "" if "" in reasons else reasons[0]
    below = [name for name in modules() if f".{name}".endswith(".".join(("", *parts[:2])))]
    if len(parts) > 2 and below:  # package.module.name
        reasons = [_why_not_in(span, [*home.split("."), *parts[2:]]) for home in below]
        return "" if "" in reasons else reasons[0]
    return "there is no such module" if ours and not below else ""


def _why_not_in(span: str, parts: list[str]) -> str:
    """Follow a whole dotted name: its module, then what that defines, then a class's members."""
    known = [n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in modules()]
    if not known:
        folder = ROOT / PACKAGES[parts[0]] / "/".join(parts)
        return "" if folder.is_dir() else f"there is no module {'.'.join(parts[:2])}"
    module, rest = ".".join(parts[: known[0]]), parts[known[0] :]
    if not rest:
        return ""
    if rest[0] not in modules()[module].members:
        return f"{module} defines no {rest[0]}"
    if len(rest) > 1 and rest[0] in classes() and not has(rest[0], rest[1]):
        return f"class {rest[0]} has no {rest[1]}"
    return ""


@cache
def flags() -> frozenset[str]:
    """Every flag of our command lines: those that are written out, and the fields that become flags."""
    found = {"--help", "--nbmake", "--overwrite", "--strict"}  # of tools that our commands start
    for package, folder in PACKAGES.items():
        if package == "tests":
            continue
        for path in (ROOT / folder / package).rglob("*.py"):
            for flag in re.findall(r'(?:add_argument|addoption)\(\s*"(--[\w-]+)"', path.read_text(encoding="utf-8")):
                found.add(flag)
    for name in ("EngineConfig", "SamplingParams", "ServerConfig"):
        for names in classes()[name]:
            flags = {member.replace("_", "-") for member in names.members}
            found |= {f"--{flag}" for flag in flags} | {f"--no-{flag}" for flag in flags}
    return frozenset(found)


@cache
def source() -> str:
    """All our code, to look for the names of environment variables."""
    files = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return "\n".join(path.read_text(encoding="utf-8") for path in (*files, ROOT / "Makefile") if path != Path(__file__))


@cache
def files() -> tuple[str, ...]:
    """Our files' paths, with a slash before each."""
    return tuple(f"/{path.relative_to(ROOT).as_posix()}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.*"))


def why_not(span: str, ours: bool = False, of_others: bool = False) -> str:
    """Why a span names something of ours that does not exist; empty if it exists or is not ours. See Span."""
    if re.fullmatch(r"[\w/]+\.(py|cuh?)", span) and (ours or span.startswith("test_")):
        return "" if any(file.endswith(f"/{span}") for file in files()) else "there is no such file"
    if _PATH.fullmatch(span) and not re.search(r"NN|NAME", span):
        return "" if (ROOT / span).exists() else "there is no such path"
    if _DOTTED.fullmatch(bare := re.sub(r"\(.*\)$", "", span)):
        return why_no_symbol(bare, ours)
    if span.startswith("make ") and (target := re.match(r"make ([a-z-]+)", span)):
        known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        return "" if target[1] in known else f"make has no target {target[1]}"
    if (span.startswith("--") and not of_others) or _COMMAND.match(span):
        unknown = [flag for flag in re.findall(r"(?<!\S)--[a-z][\w-]*", span) if flag not in flags()]
        return f"no command has {unknown[0]}" if unknown else _why_no_command(span)
    if variable := re.match(r"\$?(MINISGL_\w+)", span):
        return "" if variable[1] in source() else f"nothing reads {variable[1]}"
    if (call := _call(span)) and call[0] in classes():
        wrong = [name for name in call[1] if not _takes(call[0], name)]
        return f"{call[0]} takes no {wrong[0]}" if wrong else ""
    return ""


def _why_no_command(span: str) -> str:
    """Subcommands of minisgl and modules of benchmarks."""
    words = span.split()
    if words[0] == "minisgl" and len(words) > 1:
        known = re.findall(r'command\("(\w+)"', (ROOT / "minisgl/cli.py").read_text(encoding="utf-8"))
        return "" if words[1] in (*known, "--help", "…") else f"minisgl has no command {words[1]}"
    if words[:2] == ["python", "-m"] and words[2].startswith("benchmarks."):
        return _why_not_in(words[2], words[2].split("."))
    return ""


def _call(span: str) -> tuple[str, list[str]] | None:
    """Class and keywords of `Class(name=…)`."""
    if not (found := re.fullmatch(r"([A-Z]\w+)\((.*)\)", span)):
        return None
    return found[1], re.findall(r"(?:^|, )(\w+)=", found[2])


def _takes(name: str, keyword: str) -> bool:
    return has(name, keyword) or has(name, f"_{keyword}")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_a_page_names_exists(page):
    wrong = [f"`{span.text}`: {reason}" for span in dict.fromkeys(spans(page)) if (reason := why_not(*span))]

    assert wrong == []


@pytest.mark.parametrize(
    "span",
    [
        "minisgl/engine/graff.py",
        "tests/ch99_nothing/",
        "minisgl.kvcache.pagez",
        "minisgl.kvcache.pages.PageAllocator.allocate",
        "PageAllocator.allocate",
        "PageAllocator.allocate(n)",
        "kvcache.pages.Allocator",
        "policy.ORDER",
        "request.prompt",
        "self.no_such_name",
        "test_nothing.py",
        "core.Batches",
        "--max-batch-tokenz",
        "--page-sise 16",
        "minisgl serve --ports 1",
        "minisgl server",
        "python -m benchmarks.onlin",
        "make tests",
        "MINISGL_HOUSE",
        "EngineConfig(prefix_cash=none)",
    ],
)
def test_a_name_that_does_not_exist_is_found(span):
    assert why_not(span)


@pytest.mark.parametrize(
    "span",
    [
        "minisgl/engine/graph.py",
        "kernels/",
        "minisgl.kvcache",
        "PageAllocator.alloc",
        "Qwen3ForCausalLM.forward",  # of the class above
        "StepRunner.eager_steps",  # set in a method
        "LLM.generate",
        "request.num_computed",
        "engine.step",  # an attribute of somebody's variable
        "RadixAttention.forward",  # another project's
        "torch.cuda.is_available()",
        "--no-chunked-prefill",
        "make demo TORCH=cpu",
        "MINISGL_HOME",
        'EngineConfig(trace="run.jsonl")',
    ],
)
def test_a_name_that_exists_or_is_not_ours_is_left_alone(span):
    assert why_not(span) == ""


@pytest.mark.parametrize("span", ["layers/norms.py", "engine.samplers", "kvcache.pages.Allocator"])
def test_whatever_looks_like_a_name_in_our_column_must_exist(span):
    assert why_not(span, ours=True)


def test_a_flag_on_a_line_about_another_program_may_be_that_programs():
    assert why_not("--enable-mixed-chunk")
    assert not why_not("--enable-mixed-chunk", of_others=True)


def test_in_a_table_of_engines_only_our_column_is_read(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("| here | SGLang |\n|---|---|\n| `Batch` | `Batch.phase` |\n\n`Batch.held` and `a`\n")

    assert [(span.text, span.ours) for span in spans(page)] == [("Batch", True), ("Batch.held", False), ("a", False)]


def test_fenced_code_is_not_prose(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("`a`\n\n```bash\n`b`\n```\n\n    ````python\n    `c`\n    ````\n\n``d ` e``\n")

    assert [span.text for span in spans(page)] == ["a", "d ` e"]
