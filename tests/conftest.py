"""Loads --mine, which replaces modules at their first import: nothing here imports minisgl outside a function."""

from __future__ import annotations

import os
import shutil

import pytest

if shutil.which("nvidia-smi") is None:  # no GPU: Triton kernels run in the interpreter, chosen when Triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):  # each would take all cores, and they would wait in turn
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))

pytest_plugins = ["chapters.pytest_plugin"]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="session")
def smollm2_path():
    """The default model's folder; downloads nothing."""
    import minisgl_hub as hub

    if not hub.fetched():
        pytest.skip("the default model is not here: run `minisgl fetch`")
    return hub.resolve(hub.DEFAULT_MODEL)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_path):
    """The default model's tokenizer."""
    from minisgl_hub import load_tokenizer

    return load_tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def browser():
    """Chromium, closed behind each file: while playwright has its loop, nothing else may run one in this process."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need playwright")
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        pytest.skip(f"no {', '.join(BROWSERS)} on this machine")
    with playwright.sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=executable, args=ARGUMENTS)
        yield chromium
        chromium.close()
