"""Loads --mine, which replaces modules at their first import: nothing here imports minisgl outside a function."""

from __future__ import annotations

import os
import shutil

import pytest

if shutil.which("nvidia-smi") is None:  # no GPU: Triton kernels run in the interpreter, chosen when Triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest_plugins = ["chapters.pytest_plugin"]


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
