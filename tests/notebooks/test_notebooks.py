"""What every notebook of the course has, and that its outputs are those of its code.

The words that an execution prints are compared with the kept ones where notebooks are executed: `pytest --nbmake
notebooks`, through notebooks/conftest.py. Here: that this comparison fails when it must, and passes when it must.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nbformat", reason="notebooks need the extra `dev`")

import nbformat

from chapters import labs
from chapters.manifest import load_chapters

ROOT = Path(__file__).parents[2]
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(params=PATHS, ids=[path.stem for path in PATHS])
def path(request) -> Path:
    return request.param


@pytest.fixture
def notebook(path):
    return nbformat.read(path, as_version=4)


def written(*cells: tuple[str, str], tags: tuple[str, ...] = ()):
    """A notebook of code cells, each with what it printed."""
    made = [
        nbformat.v4.new_code_cell(
            source, outputs=[nbformat.v4.new_output("stream", text=text)] if text else [], metadata={"tags": list(tags)}
        )
        for source, text in cells
    ]
    return nbformat.v4.new_notebook(cells=made)


def prints(source: str) -> bool:
    """Whether running a cell prints: a call outside its functions."""
    defined = (ast.FunctionDef, ast.ClassDef)
    rest = [node for node in ast.parse(source).body if not isinstance(node, defined)]
    calls = [node for part in rest for node in ast.walk(part) if isinstance(node, ast.Call)]
    return any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls)


def test_every_chapter_has_a_notebook():
    assert [path.stem for path in PATHS] == [chapter.name for chapter in load_chapters(ROOT)]


def test_it_opens_with_what_will_be_seen(notebook):
    first = notebook.cells[0]

    assert first.cell_type == "markdown"
    assert first.source.startswith("# Chapter ")
    assert "You will see" in first.source


def test_it_asks_for_two_predictions_and_each_stands_before_the_cell_that_answers(notebook):
    asked = [i for i, cell in enumerate(notebook.cells) if cell.cell_type == "markdown" and "**Predict" in cell.source]

    assert len(asked) >= 2
    assert all(notebook.cells[i + 1].cell_type == "code" for i in asked)


def test_it_shows_two_plots_or_more(notebook):
    shown = [output for cell in labs.code_cells(notebook) for output in cell.outputs]

    assert sum("image/png" in output.get("data", {}) for output in shown) >= 2


def test_it_is_no_longer_than_forty_cells(notebook):
    assert len(notebook.cells) <= 40


def test_its_first_cell_links_to_its_page_and_to_how_it_is_run(path, notebook):
    links = re.findall(r"\]\(([^)]+)\)", notebook.cells[0].source)

    assert f"../chapters/{path.stem}/index.md" in links
    assert "../chapters/reference/notebooks.md" in links


def test_its_links_lead_to_files_as_jupyter_follows_them(path, notebook):
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    links = [link for text in texts for link in re.findall(r"\]\(((?!https?:)[^)#]+)", text)]

    assert [link for link in links if not (path.parent / link).exists()] == []


def test_on_the_site_its_links_lead_to_pages():
    hooks = pytest.importorskip("chapters.hooks", reason="the site needs the extra `site`")
    urls = {"04_radix_reuse/index.md": "04_radix_reuse/index.html"}
    link = '<a href="../chapters/04_radix_reuse/index.md#tasks">chapter 4</a>'

    shown = hooks.link_pages(link, "notebooks/04_radix_reuse.html", urls)

    assert shown == '<a href="../04_radix_reuse/index.html#tasks">chapter 4</a>'
    with pytest.raises(KeyError):
        hooks.link_pages(link, "notebooks/04_radix_reuse.html", {})


def test_it_was_executed_from_top_to_bottom(notebook):
    counts = [cell.execution_count for cell in labs.code_cells(notebook)]

    assert counts == list(range(1, len(counts) + 1))


def test_every_cell_that_prints_has_its_output(notebook):
    silent = [
        c.source for c in labs.code_cells(notebook) if prints(c.source) and not any("text" in o for o in c.outputs)
    ]

    assert silent == []


def test_its_outputs_are_those_of_the_code_that_is_there(notebook):
    assert notebook.metadata.get(labs.NOTED) == labs.code_digest(notebook), "run `make notebooks`"


def test_edited_code_has_another_digest_and_edited_text_has_not():
    kept = written(("print(1)", "1\n"))
    kept.cells.insert(0, nbformat.v4.new_markdown_cell("One."))
    before = labs.code_digest(kept)

    kept.cells[0].source = "Another one."
    assert labs.code_digest(kept) == before
    kept.cells[1].source = "print(2)"
    assert labs.code_digest(kept) != before


@pytest.mark.parametrize(
    ("kept", "executed", "same"),
    [
        ("a step takes 55 ms", "a step takes 1,288.5 ms", True),
        ("difference 2.8e-05\n", "difference -1e-6\n", True),
        ("rows    9.5\n", "rows 1234.5\n", True),
        ("by inf at most", "by 4.3e-01 at most", True),
        ("64 is  9 tokens", "64 is 9 rows", False),
        ("a\nb", "a", False),
        ("chapter4", "chapters", False),
    ],
)
def test_words_are_compared_and_numbers_are_not(kept, executed, same):
    found = list(labs.differences(written(("x", kept)), written(("x", executed))))

    assert (found == []) == same


def test_a_cell_with_counts_is_compared_with_its_numbers():
    kept, executed = (written(("x", f"{steps} steps"), tags=("exact",)) for steps in (52, 64))

    assert list(labs.differences(kept, executed)) == ["code cell 1 said '52 steps', and now says '64 steps'"]


def test_a_cell_whose_words_depend_on_times_is_compared_by_kind():
    kept, other, silent = (written(("x", text), tags=("varies",)) for text in ("faster", "slower", ""))

    assert list(labs.differences(kept, other)) == []
    assert list(labs.differences(kept, silent)) == ["code cell 1 showed stdout, and now shows nothing"]


def test_a_warning_is_no_difference():
    kept, executed = written(("x", "done")), written(("x", "done"))
    executed.cells[0].outputs.insert(0, nbformat.v4.new_output("stream", name="stderr", text="old package"))

    assert list(labs.differences(kept, executed)) == []


def test_a_plot_that_is_gone_is_a_difference():
    kept, executed = written(("x", "")), written(("x", ""))
    kept.cells[0].outputs = [nbformat.v4.new_output("display_data", data={"image/png": "", "text/plain": "<Figure>"})]

    assert list(labs.differences(kept, executed)) == ["code cell 1 showed image/png, and now shows nothing"]


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="on a GPU's machine outputs are not compared")
def test_pytest_fails_where_an_execution_says_other_words_and_overwriting_makes_it_pass(tmp_path):
    pytest.importorskip("nbmake", reason="notebooks are executed with the extra `dev`")
    shutil.copy(ROOT / "notebooks/conftest.py", tmp_path)
    nbformat.write(written(("print('seven rows, 8 ms')", "seven steps, 9 ms\n")), tmp_path / "lab.ipynb")

    def execute(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--nbmake", *options, str(tmp_path)]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

    stale = execute()
    assert stale.returncode == 1
    assert "said 'seven steps, # ms', and now says 'seven rows, # ms'" in stale.stdout
    assert execute("--overwrite").returncode == 0
    assert execute().returncode == 0
    after = nbformat.read(tmp_path / "lab.ipynb", as_version=4)
    assert after.metadata[labs.NOTED] == labs.code_digest(after)
    assert "execution" not in after.cells[0].metadata
