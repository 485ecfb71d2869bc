"""A planned step as tensors: every id, position, slot and page table, whatever changed since the step before."""

from __future__ import annotations

import pytest
import torch

from minisgl.engine.arrays import BatchArrays
from tests.helpers import fake_forward, request, run_to_the_end, scheduler_with

CPU = torch.device("cpu")


def check(arrays, batch, size):
    """Compare with the same layout, computed one token after another."""
    input_ids, positions, last_rows, paged = arrays.fill(batch)
    places = [(r, i) for r, start, n in batch for i in range(start, start + n)]
    assert input_ids.tolist() == [r.tokens[i] for r, i in places]
    assert positions.tolist() == [i for _, i in places]
    assert paged.slots.tolist() == [r.pages[i // size] * size + i % size for r, i in places]
    assert last_rows.tolist() == [sum(batch.num_tokens[: i + 1]) - 1 for i in range(len(batch.requests))]
    assert paged.query_lens == batch.num_tokens
    assert paged.kv_lens == [start + n for _, start, n in batch]
    for (r, start, n), row in zip(batch, paged.page_table.tolist(), strict=True):
        used = -(-(start + n) // size)
        assert row[:used] == r.pages[:used]


@pytest.mark.parametrize("size", [1, 3, 16])
@pytest.mark.parametrize("batching", ["static", "prefill_first", "mixed"])
def test_every_step_of_a_run_is_laid_out_right(size, batching):
    limits = {"max_batch_tokens": 9, "max_running_requests": 4, "output_reserve": 0.0}
    scheduler = scheduler_with(pages=-(-32 // size), page_size=size, batching=batching, **limits)
    arrays = BatchArrays(4, scheduler.max_len, size, CPU)
    for i in range(12):
        scheduler.add(request(i, [7, 7, 7, 7, 8, i, i][: 2 + i % 6], max_tokens=4 + i))
    while batch := scheduler.plan():
        check(arrays, batch, size)
        scheduler.retire(batch, fake_forward(batch))
    assert scheduler.work.preemptions > 0


def test_rows_that_changed_hands_between_two_steps_of_the_same_requests_are_noticed():
    scheduler = scheduler_with(pages=100, max_running_requests=2)
    arrays = BatchArrays(2, 200, 16, CPU)
    pair = [request(0, [1, 2]), request(1, [3, 4])]
    for r in pair:
        scheduler.add(r)
    batch = scheduler.plan()
    check(arrays, batch, 16)
    scheduler.retire(batch, [5, 6])
    for r in pair:  # as if the pool had run out for a moment
        scheduler.running.remove(r)
        scheduler._preempt(r)
    batch = scheduler.plan()
    assert [r.row for r in batch.requests] == [1, 0]
    check(arrays, batch, 16)


def test_a_step_laid_out_twice_is_the_same():
    scheduler = scheduler_with(pages=100)
    arrays = BatchArrays(256, 200, 16, CPU)
    scheduler.add(request(0, range(20)))
    batch = scheduler.plan()

    for _ in range(2):  # the first may have been interrupted
        check(arrays, batch, 16)
    scheduler.retire(batch, fake_forward(batch))
    scheduler.abort(0)
    assert run_to_the_end(scheduler) == []
