"""A model small enough that a benchmark runs in a second, with a context that holds its prompts."""

from __future__ import annotations

import pytest

from tests.helpers import hf_twin, tiny_model
from tests.tiny_tokenizer import byte_level_tokenizer


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A Hugging Face folder: random weights, a byte-level tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("tiny")
    hf_twin(tiny_model(vocab_size=300, max_position_embeddings=2048)).save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)
    return folder
