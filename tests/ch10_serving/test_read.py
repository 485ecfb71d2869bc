"""Task 10.3: an answer from what the engine sends, however much of it comes at once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.core import TokenLogprobs
from minisgl.message.messages import Output
from minisgl.tokenizer.answer import Answer, Completion
from tests.ch10_serving.scene import BYTES, Counting, cut, ids

CUTS = st.lists(st.integers(0, 6), max_size=20)
TEXT = "Yes, 👍 aaab.\nUser: no"


def new_answer(*stop: str, tokenizer=BYTES) -> Answer:
    return Answer(Completion(prompt_tokens=3), tokenizer, stop)


def output(tokens: list[int], reason=None) -> Output:
    logprobs = [TokenLogprobs(token, -token / 100, {}) for token in tokens]
    return Output(1, tokens, reason, logprobs=logprobs)


def receive(answer: Answer, tokens, reason=None) -> None:
    answer.receive(output(tokens, reason), now=0.0)


def read_all(pieces, *stop, reason="length", tokenizer=BYTES):
    """Each piece of the tokens is received and read, the last one with the end; returns the completion, and the text of
    all reads."""
    answer, text = new_answer(*stop, tokenizer=tokenizer), ""
    for i, tokens in enumerate(pieces):
        receive(answer, tokens, reason if i == len(pieces) - 1 else None)
        answer.read()
        text += answer.fetch()
        if not answer.is_open:
            break
    return answer.completion, text


def seen(completion: Completion):
    return (
        completion.text,
        completion.token_ids,
        [entry.token_id for entry in completion.logprobs],
        completion.finish_reason,
    )


def test_a_read_brings_the_text_of_all_tokens_that_came_meanwhile():
    answer = new_answer()
    for token in ids("hello"):
        receive(answer, [token])
    answer.read()
    assert answer.fetch() == "hello"
    assert answer.is_open


def test_nothing_new_is_nothing_to_say():
    answer = new_answer()
    receive(answer, ids("hello"))
    answer.read()
    answer.read()
    assert (answer.completion.text, answer.fetch(), answer.fetch()) == ("hello", "hello", "")


def test_text_that_nobody_fetches_waits():
    answer = new_answer()
    for word in ("one ", "two"):
        receive(answer, ids(word))
        answer.read()
    assert answer.fetch() == "one two"


def test_the_end_is_known_when_it_is_read_and_not_before():
    answer = new_answer()
    receive(answer, ids("x"), "length")
    assert answer.is_open
    answer.read()
    assert answer.completion.finish_reason == "length"


def test_what_was_held_back_comes_with_the_end():
    half_a_thumb = ids("ok 👍")[:-1]
    assert read_all([half_a_thumb, []])[0].text == BYTES.decode(half_a_thumb)
    assert read_all([ids("the EN"), []], "END")[0].text == "the EN"


def test_the_end_may_come_with_the_last_tokens_or_without_any():
    for pieces in ([ids("the EN")], [ids("the "), ids("EN")], [ids("the EN"), []]):
        assert read_all(pieces, "END")[1] == "the EN"


def test_a_stop_string_ends_the_answer_whatever_the_engine_says():
    for reason in ("length", "stop", "abort"):
        completion, text = read_all([ids("Yes. END")], "END", reason=reason)
        assert (completion.finish_reason, text) == ("stop", "Yes. ")


def test_a_stop_string_ends_an_answer_that_the_engine_still_writes():
    answer = new_answer("END")
    receive(answer, ids("Yes. END"))
    answer.read()
    assert (answer.stopped, answer.is_open) == (True, False), "a stop string came: finish_reason is stop"


def test_tokens_behind_the_one_that_completed_the_stop_string_are_not_counted():
    completion, _ = read_all([ids("Yes. END and more")], "END")
    assert completion.token_ids == ids("Yes. END"), "say the tokens one by one to find which of them completed `END`"
    assert [entry.token_id for entry in completion.logprobs] == ids("Yes. END")


def test_a_stop_string_is_found_across_two_messages():
    completion, text = read_all([ids("Yes. E"), ids("ND and"), ids(" more")], "END")
    assert (text, completion.token_ids) == ("Yes. ", ids("Yes. END"))


@settings(deadline=None)
@given(CUTS, st.sampled_from([(), ("User",), ("\nUser:", "aab"), ("aaab", "aa"), ("👍",), ("zzz",), ("no", "o")]))
def test_the_answer_is_the_same_however_the_steps_are_joined(lengths, stop):
    one_by_one, text = read_all([[token] for token in ids(TEXT)], *stop)
    merged, joined = read_all(cut(ids(TEXT), lengths), *stop)
    assert seen(merged) == seen(one_by_one), "joined steps gave another answer: copy before, go back, say one at a time"
    assert joined == text == merged.text


@settings(deadline=None)
@given(st.lists(st.integers(4, 259), max_size=20), CUTS)
def test_bytes_that_are_no_text_are_the_same_too(tokens, lengths):
    assert read_all(cut(tokens, lengths), "ab")[0].text == read_all([[token] for token in tokens], "ab")[0].text


def test_many_tokens_are_decoded_in_one_go_not_one_by_one():
    for stop in ((), ("END",)):
        counting = Counting()
        read_all([ids("x" * 500)], *stop, tokenizer=counting)
        assert counting.calls <= 6, f"{counting.calls} decodes of 500 tokens, stop strings: {stop}"


def test_an_answer_without_a_tokenizer_has_ids_and_an_end():
    completion, text = read_all([[5, 6], [7]], tokenizer=None)
    assert (text, completion.token_ids, completion.finish_reason) == ("", [5, 6, 7], "length")
