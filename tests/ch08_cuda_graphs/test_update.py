"""Task 08.4: what the host changes in the rows, in place and in one copy."""

from __future__ import annotations

import pytest

from minisgl.engine.rows import DeviceRows
from tests.ch08_cuda_graphs.scene import Sent, new_request, new_rows, pages_of, step


@pytest.fixture
def rows():
    return new_rows()


@pytest.fixture
def sent(monkeypatch):
    return Sent(monkeypatch)


def decoding(rows: DeviceRows, *numbers: int, size: int = 0) -> list:
    """Requests in these rows, prompts of 5 tokens computed, whose next token the device knows."""
    requests = [new_request(row, prompt=5, pages=[10 + row, 20 + row]) for row in numbers]
    rows.update(step(*((r, 0, 5) for r in requests), moved=[(r, 0) for r in requests]), size or len(requests))
    for request in requests:
        request.tokens.append(90 + request.row)
    return requests


def test_a_newcomer_brings_its_page_table(rows):
    request = new_request(2, prompt=9, pages=[7, 3, 11])

    rows.update(step((request, 0, 9), moved=[(request, 0)]), 1)

    assert pages_of(rows, 2, 4) == [7, 3, 11, 0], "row 2's table begins at 2 · P of self._state, and changes in place"
    assert rows.page_tables[[0, 1, 3, 4, 5, 6]].count_nonzero() == 0, "nobody else's table changed"


def test_a_newcomer_brings_its_way_of_sampling(rows):
    request = new_request(4, prompt=3, pages=[1], temperature=0.75, top_k=5, top_p=0.9, min_p=0.05)

    rows.update(step((request, 0, 3), moved=[(request, 0)]), 1)

    fields = (rows.seeds, rows.top_k, rows.temperature, rows.top_p, rows.min_p)
    assert [field[4].item() for field in fields] == [1004, 5, 0.75, 0.9, 0.05]


def test_the_rows_stay_where_they_are_and_change_in_place(rows):
    tables, order, seeds = rows.page_tables, rows.order, rows.seeds  # as a graph knows them
    places = [each.data_ptr() for each in (tables, order, seeds)]
    request = new_request(1, prompt=3, pages=[9])

    rows.update(step((request, 0, 3), moved=[(request, 0)]), 1)

    assert [each.data_ptr() for each in (rows.page_tables, rows.order, rows.seeds)] == places, "a graph has addresses"
    assert (tables[1, 0].item(), order[0].item(), seeds[1].item()) == (9, 1, 1001)


def test_whatever_changed_travels_in_one_copy(rows, sent):
    first, second = new_request(0, prompt=5, pages=[4, 5]), new_request(3, prompt=1, pages=[6], temperature=1)

    rows.update(step((first, 0, 5), (second, 0, 1), moved=[(first, 0), (second, 0)]), 4)

    assert len(sent.copies) == 1, "collect all places and values, then send once"


def test_a_step_like_the_one_before_sends_nothing(rows, sent):
    a, b = decoding(rows, 0, 1)
    sent.copies.clear()

    rows.update(step((a, 5, 1), (b, 5, 1)), 2)
    rows.update(step((a, 6, 1), (b, 6, 1)), 2)  # their tokens at 6 are not known to the host yet
    rows.update(step((a, 7, 1), (b, 7, 1)), 2)

    assert sent.copies == [], "nothing changed: send what differs from what the device has, else nothing"


def test_one_new_page_is_one_number_and_its_place(rows, sent):
    [a] = decoding(rows, 3)
    sent.copies.clear()
    a.pages.append(17)

    rows.update(step((a, 5, 1), moved=[(a, 2)]), 1)

    assert sent.copies == [[1, 1]], "one page changed: send request.pages[first:] and their places, no more"
    assert pages_of(rows, 3, 4) == [13, 23, 17, 0]


def test_a_table_that_changed_from_its_first_page_on_is_sent_anew(rows):
    [a] = decoding(rows, 3)
    a.pages = [30, 23]  # published: its first page was somebody else's already

    rows.update(step((a, 5, 1), moved=[(a, 0)]), 1)

    assert pages_of(rows, 3, 2) == [30, 23], "`moved` says from which page on the table changed: from 0"


def test_a_request_that_has_lost_its_row_meanwhile_is_passed_over(rows):
    [a] = decoding(rows, 0)
    gone = new_request(5, prompt=5, pages=[8, 9])
    gone.row = -1

    rows.update(step((a, 5, 1), moved=[(gone, 0)]), 1)

    assert rows.page_tables[1:].count_nonzero() == 0, "row -1 is Python's last one, which is nobody's"


def test_places_of_the_batch_name_their_rows_and_the_rest_is_nobodys(rows):
    decoding(rows, 4, 1, 2, size=4)
    assert rows.order[:4].tolist() == [4, 1, 2, rows.nobody], "size places: the batch's rows in its order, then nobody"


def test_who_leaves_the_batch_leaves_its_place(rows):
    a, b, c = decoding(rows, 0, 1, 2, size=4)

    rows.update(step((a, 5, 1), (c, 5, 1)), 4)
    assert rows.order[:4].tolist() == [0, 2, rows.nobody, rows.nobody], "a replay would go on writing for who has left"

    rows.update(step((b, 5, 1)), 1)
    assert rows.order[0].item() == 1


def test_one_in_the_place_of_another_is_seen(rows):
    a, b = decoding(rows, 0, 1)
    rows.update(step((a, 5, 1)), 1)

    rows.update(step((b, 5, 1)), 1)
    assert rows.order[0].item() == 1

    rows.update(step((a, 6, 1)), 1)  # where b would go on
    assert rows.order[0].item() == 0


def test_others_may_come_and_go_while_a_token_is_under_way(rows):
    a, b = decoding(rows, 0, 1)
    rows.update(step((a, 5, 1), (b, 5, 1)), 2)

    rows.update(step((a, 6, 1)), 1)  # its token at 6 and the next one are not known to the host
    rows.update(step((b, 6, 1), (a, 7, 1)), 2)

    assert rows.order[:2].tolist() == [1, 0]


def test_who_comes_back_takes_its_place_again(rows):
    a, b, c = decoding(rows, 0, 1, 2, size=4)

    rows.update(step((a, 5, 1)), 4)
    rows.update(step((a, 6, 1), (b, 5, 1), (c, 5, 1)), 4)

    assert rows.order[:4].tolist() == [0, 1, 2, rows.nobody]


def test_places_beyond_the_size_are_remembered_as_they_are(rows):
    a, *_ = decoding(rows, 0, 1, 2)

    rows.update(step((a, 5, 1)), 1)  # places 1 and 2 are not looked at
    rows.update(step((a, 6, 1)), 4)

    assert rows.order[:4].tolist() == [0, rows.nobody, rows.nobody, rows.nobody], (
        "remember of each place what was sent for it, and of those beyond the size what they held before"
    )


def test_a_decode_whose_token_the_device_does_not_have_brings_it(rows):
    request = new_request(2, prompt=5, pages=[1, 2])

    rows.update(step((request, 4, 1), moved=[(request, 0)]), 1)  # the other four were found in the prefix cache

    inputs = rows.decode(1)
    assert (inputs.input_ids.tolist(), inputs.positions.tolist()) == ([request.tokens[4]], [4])
    assert inputs.kv_lens.tolist() == [5]


def test_a_chunk_of_one_token_in_the_middle_of_a_prompt_brings_that_token(rows):
    request = new_request(2, prompt=9, pages=[1, 2, 3])

    rows.update(step((request, 3, 1), moved=[(request, 0)]), 1)
    assert rows.decode(1).input_ids.tolist() == [request.tokens[3]]

    rows.update(step((request, 4, 1)), 1)  # what the step before chose is no part of the prompt
    assert (rows.decode(1).input_ids.tolist(), rows.decode(1).positions.tolist()) == ([request.tokens[4]], [4])


def test_a_token_behind_an_unfinished_chunk_is_not_taken(rows):
    request = new_request(0, prompt=6, pages=[1, 2])
    rows.update(step((request, 0, 5), moved=[(request, 0)]), 1)

    rows.update(step((request, 5, 1)), 1)

    assert (rows.decode(1).input_ids.tolist(), rows.decode(1).positions.tolist()) == ([request.tokens[5]], [5])


def test_longer_chunks_send_no_token_here(rows, sent):
    """They are laid out by `lay_out`, with all their tokens."""
    request = new_request(0, prompt=12, pages=[1, 2, 3])
    rows.update(step((request, 0, 4), moved=[(request, 0)]), 1)
    sent.copies.clear()

    rows.update(step((request, 4, 4)), 1)

    assert sent.copies == []


def test_a_newcomer_takes_nothing_from_who_had_its_row_before(rows):
    decoding(rows, 3)  # its next token is at 5
    newcomer = new_request(3, prompt=6, pages=[8, 9], temperature=0.5)
    newcomer.seed = 77

    rows.update(step((newcomer, 5, 1), moved=[(newcomer, 0)]), 1)

    told = pages_of(rows, 3, 2), rows.seeds[3].item(), rows.temperature[3].item()
    assert told == ([8, 9], 77, 0.5), "the row had another owner: its sampling fields are new too"
    assert rows.decode(1).input_ids.tolist() == [newcomer.tokens[5]], "the device has a token at 5, of somebody else"


def test_a_request_that_gets_pages_again_is_no_newcomer(rows, sent):
    """Its seed and parameters are there; its next token is on the device, and the host may not have it."""
    [a] = decoding(rows, 1)
    a.tokens.pop()
    sent.copies.clear()
    a.pages = [2, 3, 4]

    rows.update(step((a, 5, 1), moved=[(a, 0)]), 1)

    assert sent.copies == [[3, 3]], "its owner is the same request: its three pages, and no sampling fields"
