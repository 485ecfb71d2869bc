"""Stop strings in text that comes in pieces: never sent, not even in part, and nothing else is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.tokenizer.stop import StopStrings


def feed(stops, pieces):
    """All pieces that come out, those of flush included, and whether a stop string came."""
    strings, out = StopStrings(stops), []
    for piece in pieces:
        text, stopped = strings.push(piece)
        out.append(text)
        if stopped:
            return out, True
    return [*out, strings.flush()], False


def test_a_stop_string_in_one_piece_cuts_the_text_before_it():
    assert feed(["END"], ["one END two"]) == (["one "], True)


def test_a_stop_string_split_over_pieces_is_never_sent_in_part():
    assert feed(["END"], ["one E", "N", "D two"]) == (["one ", "", ""], True)


def test_what_looked_like_a_stop_string_and_was_none_is_sent():
    assert feed(["END"], ["one E", "N", "O"]) == (["one ", "", "ENO", ""], False)


def test_what_is_held_back_at_the_end_is_flushed():
    assert feed(["END"], ["one EN"]) == (["one ", "EN"], False)


def test_no_stop_strings_hold_nothing_back():
    assert feed([], ["a", "b"]) == (["a", "b", ""], False)


@pytest.mark.parametrize("stops", [["ab", "b"], ["b", "ab"]])
def test_of_several_the_earliest_in_the_text_counts(stops):
    assert feed(stops, ["xaby"]) == (["x"], True)


def test_a_beginning_that_overlaps_itself_is_still_found():
    assert feed(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", ""], True)


def test_no_more_than_could_begin_a_stop_string_is_held_back():
    strings = StopStrings(["\n\n", "stop"])
    assert strings.push("a stone sto") == ("a stone ", False)
    assert strings.push("ne\n") == ("stone", False)


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(st.text("abc", max_size=3), max_size=12),
)
def test_the_pieces_join_to_the_text_before_the_first_stop_string_to_be_complete(stops, pieces):
    out, stopped = feed(stops, pieces)
    text, seen = "".join(pieces), ""
    for piece in pieces:  # a piece is looked at as a whole
        seen += piece
        if any(stop in seen for stop in stops):
            break

    cut = min((seen.find(stop) for stop in stops if stop in seen), default=None)
    assert stopped == (cut is not None)
    assert "".join(out) == (text if cut is None else seen[:cut])
    assert not any(stop in "".join(out) for stop in stops)
