"""The three ways to put a step together, on the same arrivals. Needs all tasks."""

from __future__ import annotations

import pytest

from tests.ch05_continuous_batching.harness import drive, new_request, new_scheduler

EXPECTED = {
    "static": [  # 2 comes when the group runs already: it waits for the whole group
        [(0, 0, 6), (1, 0, 3)],
        [(0, 6, 1), (1, 3, 1)],
        [(0, 7, 1)],
        [(0, 8, 1)],
        [(2, 0, 9)],
        [(2, 9, 1)],
    ],
    "prefill_first": [  # 2 is let in at once, and 0 stands still for two steps; whoever lacks one token decodes
        [(0, 0, 4)],
        [(0, 4, 2), (1, 0, 2)],
        [(2, 0, 4)],
        [(2, 4, 4)],
        [(0, 6, 1), (1, 2, 1), (2, 8, 1)],
        [(0, 7, 1), (1, 3, 1), (2, 9, 1)],
        [(0, 8, 1)],
    ],
    "mixed": [  # a decode in every step, and 2's prompt in what they leave
        [(0, 0, 4)],
        [(0, 4, 2), (1, 0, 2)],
        [(0, 6, 1), (1, 2, 1), (2, 0, 2)],
        [(0, 7, 1), (1, 3, 1), (2, 2, 2)],
        [(0, 8, 1), (2, 4, 3)],
        [(2, 7, 2)],
        [(2, 9, 1)],
    ],
}


@pytest.mark.parametrize("batching", EXPECTED)
def test_the_same_arrivals_in_steps(batching, monkeypatch):
    monkeypatch.setattr("tests.ch05_continuous_batching.harness.next_token", lambda tokens: 1)  # nobody stops early
    scheduler = new_scheduler(batching=batching, max_batch_tokens=4)
    arrivals = [
        (0, new_request(0, prompt=6, max_tokens=4)),
        (0, new_request(1, prompt=3, max_tokens=2)),
        (1, new_request(2, prompt=9, max_tokens=2)),
    ]
    assert drive(scheduler, arrivals) == EXPECTED[batching]


@pytest.mark.parametrize("chunked", [True, False])
def test_a_static_group_is_read_in_one_step_whatever_the_budget(chunked):
    scheduler = new_scheduler(batching="static", max_batch_tokens=4, chunked_prefill=chunked, max_running_requests=2)
    for id in range(3):
        scheduler.add(new_request(id, prompt=10))
    assert scheduler.plan().num_tokens == [10, 10]


@pytest.mark.parametrize("budget", [1, 3, 16])
def test_prefill_first_never_puts_a_decode_beside_a_prompt(budget):
    scheduler = new_scheduler(batching="prefill_first", max_batch_tokens=budget)
    steps = drive(scheduler, [(3 * i, new_request(i, prompt=11, max_tokens=6)) for i in range(5)])
    for rows in steps:
        decoding = [start >= 10 for _, start, _ in rows]  # the last token of a prompt counts as one
        assert all(decoding) or not any(decoding), f"a mixed step: {rows}"
