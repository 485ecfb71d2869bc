"""Loads --mine, which replaces modules at their first import: nothing here imports minisgl outside a function."""

from __future__ import annotations

import pytest

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
