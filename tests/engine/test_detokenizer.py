"""Text streamed token by token equals the decode of all ids."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from minisgl.tokenizer.detokenizer import IncrementalDetokenizer
from tests.tiny_tokenizer import byte_level_tokenizer

TEXTS = [
    "The capital of France is Paris.",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 thumb",
    "日本語の文章と中文",
    "e\u0301 a\u0308 combining, العربية, हिन्दी",
    "tabs\tand\n\nlines  two spaces ",
]


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Words with a leading ▁, whose first space the decoder strips, and bytes for the rest (Llama 2's scheme)."""
    words = ["▁Hello", "▁world", "lo", "▁", ",", "▁a"] + [f"<0x{b:02X}>" for b in range(256)]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


BYTE_LEVEL, SENTENCEPIECE_LIKE = byte_level_tokenizer(), sentencepiece_like()


def stream(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [detokenizer.push([i]) for i in ids] + [detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_of_bytes_joins_to_the_text_and_never_shows_half_a_character(text):
    pieces = stream(BYTE_LEVEL, BYTE_LEVEL(text)["input_ids"])

    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(4, 259), max_size=40))
@settings(deadline=None)
def test_any_bytes_even_invalid_ones_stream_to_the_decode_of_all(ids):
    assert "".join(stream(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.text(max_size=5))
@settings(deadline=None)
def test_a_decoder_that_strips_the_first_space_keeps_the_others(words, text):
    ids = words + [6 + b for b in text.encode("utf-8", "ignore")] + words
    assert "".join(stream(SENTENCEPIECE_LIKE, ids)) == SENTENCEPIECE_LIKE.decode(ids)


def test_a_character_cut_at_the_end_is_flushed_not_lost():
    cut = BYTE_LEVEL("ok 👍")["input_ids"][:-1]
    pieces = stream(BYTE_LEVEL, cut)

    assert "".join(pieces) == BYTE_LEVEL.decode(cut)
    assert pieces[-1] != ""


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_the_default_models_tokens_stream_to_their_decode_for_any_cut(text, smollm2_tokenizer):
    ids = smollm2_tokenizer(text)["input_ids"]
    for end in range(1, len(ids) + 1):
        assert "".join(stream(smollm2_tokenizer, ids[:end])) == smollm2_tokenizer.decode(ids[:end])
