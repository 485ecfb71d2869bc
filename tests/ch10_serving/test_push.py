"""Task 10.1: text while its tokens come, never half a character and nothing late."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from minisgl.tokenizer.detokenizer import IncrementalDetokenizer
from tests.ch10_serving.scene import BYTES, Counting, cut, ids

TEXTS = ["plain words", "👩‍👩‍👧‍👦 and 👍🏽!", "日本語の文章", "e\u0301, العربية", "two  spaces\n\n\tand tabs "]
CUTS = st.lists(st.integers(0, 5), max_size=30)


def stripping() -> PreTrainedTokenizerFast:
    """Words that begin with a space, which the decoder takes off the first word of a text (Llama 2's scheme)."""
    words = ["▁Hello", "▁world", "lo", "▁", ",", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


STRIPPING = stripping()


def stream(tokenizer, pieces):
    """What each piece brings, and what the end does."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [*map(detokenizer.push, pieces), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_token_by_token_the_text_comes_whole_and_no_character_is_cut(text):
    pieces = stream(BYTES, [[token] for token in ids(text)])
    assert not any("\ufffd" in piece for piece in pieces), "a piece ends in half a character: wait for its other tokens"
    assert "".join(pieces) == text


def test_a_character_is_given_out_with_its_last_token():
    assert stream(BYTES, [[token] for token in ids("a👍é")]) == ["a", "", "", "", "👍", "", "é", ""]


def test_several_tokens_at_once_bring_all_whole_characters_of_theirs():
    a, b, *thumb = ids("ab👍")
    pieces = stream(BYTES, [[a, b, *thumb[:2]], thumb[2:], [a]])
    assert pieces == ["ab", "👍", "a", ""], "`ab` is certain although the last two of the four ids are half a character"


@settings(deadline=None)
@given(st.text(max_size=20), CUTS)
def test_however_the_tokens_are_cut_the_pieces_join_to_the_text(text, lengths):
    tokens = ids(text.encode("utf-8", "ignore").decode())
    assert "".join(stream(BYTES, cut(tokens, lengths))) == BYTES.decode(tokens)


@settings(deadline=None)
@given(st.lists(st.integers(4, 259), max_size=30), CUTS)
def test_bytes_that_are_no_text_at_all_stream_to_the_decode_of_all(tokens, lengths):
    assert "".join(stream(BYTES, cut(tokens, lengths))) == BYTES.decode(tokens)


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), CUTS)
def test_a_space_between_words_is_kept_where_a_text_would_begin_without_it(words, lengths):
    assert "".join(stream(STRIPPING, cut(words, lengths))) == STRIPPING.decode(words)


def test_the_second_word_brings_its_space_at_once():
    assert stream(STRIPPING, [[0], [1], [2]]) == ["Hello", " world", "lo", ""]


def test_special_tokens_are_no_text():
    assert stream(BYTES, [[1], ids("hi"), [0]]) == ["", "hi", "", ""]


def test_a_token_costs_the_same_however_long_the_answer_is():
    counting = Counting()
    detokenizer = IncrementalDetokenizer(counting)
    for token in ids("a long answer, " * 40):
        before = counting.decoded
        detokenizer.push([token])
        assert counting.decoded - before <= 8, "all that was said before is decoded again"


def test_a_thousand_tokens_at_once_are_not_decoded_a_thousand_times():
    counting = Counting()
    assert IncrementalDetokenizer(counting).push(ids("x" * 1000)) == "x" * 1000
    assert counting.calls <= 4


def test_the_callers_list_is_left_as_it_was():
    tokens = ids("ab👍")[:-1]
    detokenizer = IncrementalDetokenizer(BYTES)
    detokenizer.push(tokens)
    detokenizer.push([5])
    assert tokens == ids("ab👍")[:-1]
