"""Small models for the engine's tests."""

from __future__ import annotations

import pytest

from tests.helpers import hf_twin, tiny_model
from tests.tiny_tokenizer import byte_level_tokenizer


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A Hugging Face folder: random weights, a byte-level tokenizer that writes BOS, and a chat template."""
    folder = tmp_path_factory.mktemp("tiny")
    model = tiny_model(vocab_size=300, tie_word_embeddings=False, max_position_embeddings=128, eos_token_ids=(0,))
    hf_twin(model).save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)
    return folder
