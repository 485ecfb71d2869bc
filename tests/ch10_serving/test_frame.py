"""Task 10.4: one server-sent event."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.server.replies import frame
from tests.ch10_serving.scene import events

DATA = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=2), inner, max_size=3),
    max_leaves=8,
)


def test_an_event_is_a_line_of_data_and_an_empty_line():
    assert frame([1]) == b"data: [1]\n\n"


@pytest.mark.parametrize("text", ["two\nlines", "two\n\nparagraphs", "carriage\rreturn\r\n", "data: [DONE]\n\n"])
def test_line_ends_of_the_text_do_not_end_the_event(text):
    event = frame({"text": text})
    assert events(event) == [{"text": text}]
    assert event.count(b"\n") == 2
    assert b"\r" not in event


def test_every_character_travels():
    assert events(frame({"text": '👍 日本 \u2028 \u0000 " \\'})) == [{"text": '👍 日本 \u2028 \u0000 " \\'}]


@settings(deadline=None)
@given(st.lists(DATA, max_size=5))
def test_events_behind_each_other_are_read_one_by_one(items):
    assert events(b"".join(map(frame, items))) == items


def test_an_event_is_no_larger_than_it_must_be():
    data = {"choices": [{"index": 0, "text": "日本"}]}
    assert len(frame(data)) <= len(json.dumps(data, ensure_ascii=False).encode()) + len("data: \n\n")
