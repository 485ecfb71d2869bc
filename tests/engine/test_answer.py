"""An answer's text and end do not depend on how many tokens are read at a time."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.core import TokenLogprobs
from minisgl.message.messages import Output
from minisgl.tokenizer.answer import Answer, Completion
from minisgl.tokenizer.stop import StopStrings
from tests.tiny_tokenizer import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
EOS = TOKENIZER.eos_token_id


def ids(text):
    return TOKENIZER(text)["input_ids"]


def logprobs_of(tokens):
    return [TokenLogprobs(token, -1.0, {}) for token in tokens]


def read(tokens, cuts, stop=(), tokenizer=TOKENIZER):
    """The answer, read after each cut, and the text that each reading brought."""
    answer, pieces = Answer(Completion(3), tokenizer, stop), []
    for start, end in pairwise([0, *cuts, len(tokens)]):
        reason, part = "length" if end == len(tokens) else None, tokens[start:end]
        answer.receive(Output(0, part, reason, logprobs=logprobs_of(part)), now=1.0)
        answer.read()
        pieces.append(answer.fetch())
        if not answer.is_open:
            break
    return answer.completion, pieces


def one_by_one(tokens, stop=()):
    return read(tokens, range(1, len(tokens)), stop)[0]


def told(completion):
    return completion.text, completion.token_ids, completion.logprobs, completion.finish_reason


WORDS = st.lists(st.sampled_from(["a", "b", "👍", "日本", "ab", "é", " "]), max_size=12).map("".join)


@given(st.data(), WORDS, st.lists(st.sampled_from(["ab", "b", "👍", "本a", "ba b", "  "]), max_size=2))
@settings(deadline=None)
def test_tokens_read_together_give_what_they_give_one_by_one(data, text, stop):
    tokens = [*ids(text), EOS]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(tokens) - 1)))) if len(tokens) > 1 else []

    completion, pieces = read(tokens, cuts, stop)
    assert told(completion) == told(one_by_one(tokens, stop))
    assert "".join(pieces) == completion.text


@given(st.data(), st.lists(st.integers(4, 259), min_size=1, max_size=30))
@settings(deadline=None)
def test_any_bytes_read_in_any_parts_give_the_decode_of_all(data, tokens):
    cuts = sorted(data.draw(st.sets(st.integers(1, len(tokens)))) - {len(tokens)})
    assert read(tokens, cuts)[0].text == TOKENIZER.decode(tokens)


def test_text_comes_as_far_as_its_characters_are_whole():
    tokens = ids("one 👍")
    completion, pieces = read(tokens, [len(tokens) - 2])

    assert pieces == ["one ", "👍"]
    assert completion.text == "one 👍"


def test_a_stop_string_ends_the_answer_with_the_token_that_completed_it():
    tokens = ids("one END two")
    completion, _ = read(tokens, [], stop=["END"])

    end = len(ids("one END"))
    assert told(completion) == ("one ", tokens[:end], logprobs_of(tokens[:end]), "stop")


def test_the_stop_string_that_is_complete_first_counts():
    completion, _ = read(ids("abcd"), [], stop=["abcd", "bc"])
    assert (completion.text, completion.token_ids) == ("a", ids("abc"))


def test_an_answer_without_tokenizer_has_tokens_and_no_text():
    completion, _ = read([5, 6], [1], tokenizer=None)
    assert told(completion) == ("", [5, 6], logprobs_of([5, 6]), "length")


def test_times_are_those_of_receiving_not_of_reading():
    answer = Answer(Completion(3), TOKENIZER, ())
    start = answer._submitted
    answer.receive(Output(0, []), start + 1)
    answer.receive(Output(0, [5]), start + 2)
    answer.receive(Output(0, [6], "length"), start + 4)
    answer.read()

    assert (answer.completion.first_token_s, answer.completion.total_s) == pytest.approx((2, 4))
    assert answer.completion.decode_tokens_per_s == pytest.approx(1 / 2)


@given(st.text("abc", max_size=20), st.lists(st.text("abc", min_size=1, max_size=3), max_size=3))
def test_without_a_detokenizer_between_stop_strings_cut_the_text_at_the_same_place(text, stop):
    strings, out = StopStrings(stop), ""
    for letter in text:
        piece, stopped = strings.push(letter)
        out += piece
        if stopped:
            break
    else:
        out += strings.flush()
    completion, _ = read(ids(text) or [EOS], [], stop)
    assert completion.text == out
