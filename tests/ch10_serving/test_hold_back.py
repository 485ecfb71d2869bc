"""Task 10.2: nothing of a stop string is sent, and nothing else is kept longer than it must be."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from minisgl.tokenizer.stop import StopStrings

SHORT = st.text("ab", max_size=3)


def certain(text: str, stops: list[str]) -> tuple[str, bool]:
    """By definition: the text before the first stop string; if none is there, what none can still begin in."""
    if found := [text.find(stop) for stop in stops if stop in text]:
        return text[: min(found)], True
    ends = [i for i in range(len(text)) if any(stop.startswith(text[i:]) for stop in stops)]
    return text[: min(ends, default=len(text))], False


def push_all(stops, *pieces):
    """What comes out of each push, up to the one that finds a stop string."""
    strings, out = StopStrings(stops), []
    for piece in pieces:
        text, stopped = strings.push(piece)
        out.append((text, stopped))
        if stopped:
            break
    return out


def test_text_before_a_stop_string_is_given_out_and_the_rest_is_not():
    assert push_all(["END"], "one END two") == [("one ", True)]


def test_a_stop_string_that_comes_in_parts_is_never_sent_in_part():
    assert push_all(["\n\nUser:"], "Yes.\n", "\nUs", "er: and") == [("Yes.", False), ("", False), ("", True)]


def test_what_looked_like_its_beginning_is_sent_when_it_turns_out_otherwise():
    assert push_all(["END"], "E", "N", "O") == [("", False), ("", False), ("ENO", False)]


def test_no_more_is_held_back_than_may_begin_a_stop_string():
    assert push_all(["END"], "FRIENE") == [("FRIEN", False)]


def test_a_beginning_inside_a_beginning_is_not_forgotten():
    assert push_all(["aab"], "aa", "ab") == [("", False), ("a", True)]


def test_of_several_that_may_come_the_one_that_began_first_counts():
    assert push_all(["lo wo", "o"], "hel") == [("he", False)]
    assert push_all(["world", "lo"], "hello world") == [("hel", True)]


def test_the_order_of_the_stop_strings_means_nothing():
    for stops in (["b", "ab"], ["ab", "b"]):
        assert push_all(stops, "xaby") == [("x", True)]


def test_without_stop_strings_all_passes():
    assert push_all([], "a", "", "b") == [("a", False), ("", False), ("b", False)]


def test_the_end_brings_what_was_held_back():
    strings = StopStrings(["END"])
    assert strings.push("the EN") == ("the ", False)
    assert strings.flush() == "EN"
    assert strings.flush() == ""


def test_after_a_stop_string_nothing_is_left_to_flush():
    strings = StopStrings(["END"])
    strings.push("the E")
    strings.push("ND and E")
    assert strings.flush() == ""


@settings(deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.lists(SHORT, max_size=8))
@example(["abab", "ba"], ["ab", "a", "b"])
def test_after_each_piece_exactly_what_is_certain_has_come_out(stops, pieces):
    strings, received, given_out = StopStrings(stops), "", ""
    for piece in pieces:
        received += piece
        text, stopped = strings.push(piece)
        given_out += text
        assert (given_out, stopped) == certain(received, stops)
        if stopped:
            return
    assert given_out + strings.flush() == received
