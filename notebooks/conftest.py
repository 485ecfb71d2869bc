"""`pytest --nbmake notebooks`: an execution whose outputs differ in kind from those that are kept fails.

With --overwrite they are kept in place of the old ones, with a digest of their code. chapters/labs.py has the rules.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest

from chapters import labs


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("nbmake", default=False):
        return
    os.environ.setdefault("PYTHONWARNINGS", "ignore:IProgress not found")  # of the kernels: bars need no widgets here
    import nbformat
    from nbmake import pytest_items
    from nbmake.nb_result import NotebookError

    writes, has_gpu = config.getoption("overwrite"), shutil.which("nvidia-smi") is not None

    class Run(pytest_items.NotebookRun):
        def execute(self) -> Any:
            kept = nbformat.read(self.filename, as_version=4)
            result = super().execute()
            labs.note(result.nb)
            if result.error is None and not writes and not has_gpu:
                found = list(labs.differences(kept, result.nb))
                advice = f"{self.filename.name}: outputs are stale; `make notebooks` writes them anew"
                if found:
                    result.error = NotebookError(advice, "\n".join([advice, *found]), failing_cell_index=0)
            return result

    pytest_items.NotebookRun = Run
