"""What a fresh clone rests on: commands, versions, packaging, and what the repository may contain."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
FOLLOWS_TORCH = {"gpu", "flash-attn"}  # extras whose versions depend on the build of torch

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def pyproject() -> dict:
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return toml.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def direct_requirements() -> list[Requirement]:
    project = pyproject()["project"]
    extras = {name: texts for name, texts in project["optional-dependencies"].items() if name not in FOLLOWS_TORCH}
    return [Requirement(text) for texts in (project["dependencies"], *extras.values()) for text in texts]


def pins(python: str) -> dict[str, str]:
    """Package to version, as constraints.txt has it for a version of Python."""
    environment = {**default_environment(), "python_version": python}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found: dict[str, str] = {}
    for line in lines:
        if line.startswith("#"):
            continue
        pin = Requirement(line)
        if pin.marker is None or pin.marker.evaluate(environment):
            name = canonicalize_name(pin.name)
            assert name not in found, f"{name} is pinned twice for Python {python}"
            found[name] = str(pin.specifier).removeprefix("==")
    return found


def committed_files() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "chapters/index.md"])
def test_every_make_command_of_a_page_is_a_target(page):
    named = re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE)

    assert named
    assert set(named) <= make_targets()


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_every_local_link_of_a_page_leads_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    links = re.findall(r'\]\(([^)#:]+)\)|(?:src|srcset)="([^":]+)"', text)

    assert [link for pair in links for link in pair if link and not (ROOT / link).exists()] == []


@needs_make
def test_plain_make_prints_the_commands_and_installs_nothing(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)

    done = subprocess.run(["make"], cwd=tmp_path, capture_output=True, text=True, check=True)

    assert re.search(r"^make demo +\S", done.stdout, flags=re.MULTILINE)
    assert [path.name for path in tmp_path.iterdir()] == ["Makefile"]


@needs_make
@pytest.mark.parametrize(
    ("fails", "says"),
    [
        ("version_info", "Python 3.9.18 is too old: minisgl needs 3.10 or newer"),
        ("ensurepip", "apt install python3-venv"),
    ],
)
def test_an_unusable_python_is_told_in_one_line_before_anything_is_made(tmp_path, fails, says):
    shutil.copy(ROOT / "Makefile", tmp_path)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in --version) echo "Python 3.9.18";; *{fails}*) exit 1;; esac\n')
    python.chmod(0o755)

    done = subprocess.run(["make", "demo", f"PYTHON={python}"], cwd=tmp_path, capture_output=True, text=True)

    assert done.returncode != 0
    assert says in done.stderr
    assert not (tmp_path / ".venv").exists()


@needs_make
def test_a_python_that_is_not_there_is_named(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)

    done = subprocess.run(["make", "demo", "PYTHON=python3.99"], cwd=tmp_path, capture_output=True, text=True)

    assert "python3.99 is not installed" in done.stderr


@pytest.mark.parametrize("python", PYTHONS)
def test_constraints_hold_a_fitting_version_of_every_direct_dependency(python):
    pinned = pins(python)
    required = [requirement for requirement in direct_requirements() if requirement.name != "torch"]

    assert [str(r) for r in required if pinned.get(canonicalize_name(r.name), "0") not in r.specifier] == []


@pytest.mark.parametrize("python", PYTHONS)
def test_constraints_leave_torch_and_what_follows_its_build_free(python):
    assert [name for name in pins(python) if re.match(r"torch|triton|nvidia-|cuda-|flash-attn", name)] == []


def test_figures_are_drawn_by_one_matplotlib_on_every_python():
    assert len({pins(python)["matplotlib"] for python in PYTHONS}) == 1


def test_the_tested_torch_fits_the_packages_requirement():
    from scripts.install_torch import TESTED

    [ours] = [requirement for requirement in direct_requirements() if requirement.name == "torch"]
    [version] = Requirement(TESTED).specifier

    assert version.version in ours.specifier


def test_minisgl_imports_with_torch_alone():
    code = (
        "import sys, torch; before = set(sys.modules); import minisgl, minisgl.simple, minisgl.models.register\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(new - set(sys.stdlib_module_names)))"
    )
    search = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'kernels')!r}]\n"

    done = subprocess.run([sys.executable, "-c", search + code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["minisgl", "minisgl_kernels"]


def test_a_wheel_holds_every_package_whole_and_the_command(tmp_path):
    source = tmp_path / "source"
    unbuilt = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("minisgl", "kernels", "hub"):
        shutil.copytree(ROOT / folder, source / folder, ignore=unbuilt)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)

    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "--wheel-dir", tmp_path, source], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [entry_points] = [name for name in names if name.endswith("entry_points.txt")]
        assert "minisgl = minisgl.cli:main" in archive.read(entry_points).decode()
    bases = (source, source / "kernels", source / "hub")
    modules = [path.relative_to(base) for base in bases for path in base.glob("minisgl*/**/*.py")]
    assert {module.as_posix() for module in modules} == {name for name in names if name.endswith(".py")}


def test_no_file_names_a_package_index_so_the_readers_own_configuration_decides():
    hosts = [".".join(parts) for parts in (("pypi", "org"), ("pythonhosted", "org"), ("download", "pytorch", "org"))]

    naming = {
        str(path.relative_to(ROOT)): host
        for path in committed_files()
        for host in hosts
        if host.encode() in path.read_bytes()
    }

    assert naming == {}


@pytest.mark.parametrize("notebook", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.name)
def test_a_committed_notebook_was_run_from_top_to_bottom_and_shows_its_outputs(notebook):
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code" and cell["source"]]

    assert len(cells) <= 40
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert outputs
    assert [output for output in outputs if output["output_type"] == "error"] == []
