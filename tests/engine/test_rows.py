"""The rows on the device: what a step reads there is what was planned, and only what changed is sent."""

from __future__ import annotations

import pytest
import torch

from minisgl.engine.rows import DeviceRows, Mailbox, laid_out_len
from tests.helpers import request, scheduler_with

CPU = torch.device("cpu")


@pytest.fixture
def sent(monkeypatch):
    """How many integers each copy to the device held."""
    sizes, send = [], Mailbox.send

    def spied(self, parts, to=None):
        sizes.append(sum(len(part) for part in parts))
        return send(self, parts, to)

    monkeypatch.setattr(Mailbox, "send", spied)
    return sizes


class Run:
    """A scheduler, its rows, and a fake model that reads its inputs from the rows, as a step does."""

    def __init__(self, *requests, ahead=0, **config):
        switches = {"pages": 100, "page_size": 4, "max_running_requests": 4, "overlap": "on" if ahead else "off"}
        self.scheduler = scheduler_with(**switches | config)
        limits = self.scheduler.config
        self.rows = DeviceRows(limits.max_running_requests, 120, limits.page_size, CPU)
        self.flying, self.ahead = [], ahead
        for r in requests:
            self.scheduler.add(r)

    def plan(self):
        return self.scheduler.plan()

    def launch(self, batch, padding=0):
        """Check and run a step: the inputs are those that the batch names, token by token."""
        n, total = len(batch.requests), batch.total_tokens
        size, num_tokens = n + padding, total + padding
        self.rows.update(batch, size)
        inputs = self.rows.decode(size) if total == n else self.rows.lay_out(batch, num_tokens, size)
        self.check(inputs, batch)
        # What a model would say, from what the device has: by id and position, which fake_token is not.
        last = range(n) if inputs.last_rows is None else inputs.last_rows[:n].tolist()
        chosen = [(7 * int(inputs.input_ids[i]) + int(inputs.positions[i])) % 100 for i in last]
        self.rows.keep(inputs, torch.tensor(chosen + [99] * padding))
        self.flying.append((batch, chosen))
        while len(self.flying) > self.ahead:
            self.retire()

    def retire(self):
        batch, chosen = self.flying.pop(0)
        return self.scheduler.retire(batch, chosen)

    def step(self, padding=0):
        batch = self.plan()
        self.launch(batch, padding)
        return batch

    def check(self, inputs, batch):
        page_size, n, total = self.rows.page_size, len(batch.requests), batch.total_tokens
        places = [(r, i) for r, start, count in batch for i in range(start, start + count)]
        known = [(k, r.tokens[i]) for k, (r, i) in enumerate(places) if i < len(r.tokens)]
        assert [int(inputs.input_ids[k]) for k, _ in known] == [token for _, token in known]
        assert inputs.positions[:total].tolist() == [i for _, i in places]
        assert inputs.slots[:total].tolist() == [r.pages[i // page_size] * page_size + i % page_size for r, i in places]
        assert inputs.kv_lens[:n].tolist() == [start + count for _, start, count in batch]
        assert inputs.query_starts[: n + 1].tolist() == [sum(batch.num_tokens[:i]) for i in range(n + 1)]
        assert inputs.rows[:n].tolist() == [r.row for r in batch.requests]
        if inputs.last_rows is not None:
            assert inputs.last_rows[:n].tolist() == [sum(batch.num_tokens[: i + 1]) - 1 for i in range(n)]
        for (r, start, count), table in zip(batch, inputs.page_table.tolist(), strict=False):
            used = -(-(start + count) // page_size)
            assert table[:used] == r.pages[:used]
        assert inputs.temperature[:n].tolist() == pytest.approx([r.params.temperature for r in batch.requests])
        assert inputs.seeds[:n].tolist() == [r.seed for r in batch.requests]
        top_k, top_p, min_p = self.rows.filters(inputs.rows[:n])
        assert top_k.tolist() == [r.params.top_k for r in batch.requests]
        assert top_p.tolist() == pytest.approx([r.params.top_p for r in batch.requests])
        assert min_p.tolist() == pytest.approx([r.params.min_p for r in batch.requests])
        # Padding is nobody's: it reads and writes the dummy page, and nothing of it is kept.
        nobody = self.rows.nobody
        assert inputs.rows[n:].tolist() == [nobody] * (len(inputs.rows) - n)
        assert all(slot < page_size for slot in inputs.slots[total:].tolist())
        assert (int(self.rows.lengths[nobody]), self.rows.page_tables[nobody].count_nonzero()) == (0, 0)


def drawn(i, n, **params):
    """A request with parameters of its own."""
    r = request(i, [i + 1] * n, temperature=0.1 * i, top_k=i, top_p=1 - 0.05 * i, min_p=0.01 * i, **params)
    r.seed = 2**62 + i
    return r


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("size", [1, 3, 16])
@pytest.mark.parametrize("batching", ["static", "prefill_first", "mixed"])
def test_every_step_of_a_run_reads_what_was_planned(size, batching, ahead, padding):
    limits = {"max_batch_tokens": 9, "max_running_requests": 8, "output_reserve": 0.0, "pages": -(-40 // size)}
    requests = [drawn(i, 2 + i % 6, max_tokens=4 + i) for i in range(12)]
    run = Run(*requests, ahead=ahead, page_size=size, batching=batching, **limits)
    while run.scheduler.has_work:
        batch = run.plan()
        if batch is None or len(batch.requests) + padding > 8:  # no graph has that many places
            padding = 0
        run.launch(batch, padding) if batch else run.retire()

    assert {r.finish_reason for r in requests} == {"length"}
    assert run.scheduler.work.preemptions > 0


@pytest.mark.parametrize("ahead", [0, 1])
def test_nothing_is_sent_while_each_goes_on_by_one_token_within_its_page(sent, ahead):
    run = Run(drawn(0, 3), drawn(1, 3), page_size=16, ahead=ahead)
    run.step()
    run.step()
    sent.clear()
    for _ in range(8):
        run.step()

    assert sent == []


def test_only_a_new_page_is_sent_when_one_came(sent):
    run = Run(drawn(0, 3), drawn(1, 2), page_size=4)
    run.step()
    run.step()
    sent.clear()
    moved = [run.step().moved for _ in range(4)]

    assert [len(each) for each in moved] == [1, 1, 0, 0]
    assert sent == [2, 2]  # one place and one page each


def test_only_the_order_is_sent_when_the_last_leaves(sent):
    run = Run(drawn(0, 3), drawn(1, 3, max_tokens=3), page_size=16)
    for _ in range(3):
        run.step(padding=1)
    sent.clear()
    batch = run.plan()
    run.launch(batch, padding=2)

    assert [r.id for r in batch.requests] == [0]
    assert sent == [2]  # place 1 is nobody's


def test_those_behind_one_that_leaves_move_up():
    run = Run(*(drawn(i, 3, max_tokens=2 if i == 0 else 9) for i in range(4)), page_size=16)
    for _ in range(5):
        run.step()

    assert run.rows.order[:3].tolist() == [r.row for r in run.scheduler.running]


def test_a_newcomer_in_a_used_row_brings_its_parameters_and_its_pages():
    first, second = drawn(1, 5, max_tokens=2), drawn(9, 7, max_tokens=3)
    run = Run(first, second, max_running_requests=1)
    while run.scheduler.has_work:
        run.step()

    assert run.rows.seeds[0] == second.seed


def test_a_device_without_fp64_keeps_the_parameters_in_fp32(monkeypatch):
    monkeypatch.setattr("minisgl.engine.rows._has_fp64", lambda device: False)
    run = Run(*(drawn(i, 2 + i, max_tokens=5) for i in range(6)), page_size=16)
    while run.scheduler.has_work:
        run.step()  # which checks them

    assert {each.dtype for each in (run.rows.temperature, run.rows.top_p, run.rows.min_p)} == {torch.float32}


def test_a_preempted_request_comes_back_to_its_old_row_with_its_tokens():
    run = Run(r := drawn(0, 6, max_tokens=9), page_size=4)
    run.step()
    run.step()
    row = r.row
    run.scheduler.running.remove(r)
    run.scheduler._preempt(r)
    while run.scheduler.has_work:
        run.step()
        assert r.row in (row, -1)


def test_rows_that_changed_hands_between_two_steps_of_the_same_requests_are_noticed():
    pair = [drawn(0, 2), drawn(1, 2)]
    run = Run(*pair, max_running_requests=2)
    run.step()
    before = [r.row for r in pair]
    for r in pair:  # as if the pool had run out for a moment
        run.scheduler.running.remove(r)
        run.scheduler._preempt(r)
    run.step()
    assert [r.row for r in pair] == before[::-1]
    run.step()


def test_the_last_prompt_token_alone_is_sent_and_not_taken_from_the_step_before():
    run = Run(r := drawn(0, 5, max_tokens=3), max_batch_tokens=4)
    run.step()
    batch = run.plan()
    assert (batch.starts, batch.num_tokens) == ([4], [1])
    run.rows.tokens.fill_(77)  # what the device has there is no token of this request
    run.launch(batch)

    assert len(r.output) == 1


def test_a_token_that_only_the_device_knows_is_read_there_also_beside_a_chunk():
    run = Run(drawn(0, 3), max_batch_tokens=5, ahead=1)
    run.step()
    run.scheduler.add(drawn(1, 9))
    batch = run.plan()
    assert batch.num_tokens == [1, 4]
    chosen = run.flying[0][1][0]
    run.rows.update(batch, 2)
    inputs = run.rows.lay_out(batch, 5, 2)

    assert inputs.input_ids.tolist() == [chosen, 2, 2, 2, 2]


def test_an_unfinished_chunk_leaves_no_token_to_go_on_from():
    run = Run(r := drawn(0, 10, max_tokens=3), max_batch_tokens=4)
    while run.scheduler.has_work:
        run.step()
        run.rows.tokens[r.row] += 0 if r.output else 50  # what a chunk "chose" must not be read

    assert len(r.output) == 3


def test_nobody_stays_at_length_0_after_many_padded_steps():
    run = Run(drawn(0, 3, max_tokens=60), page_size=16)
    for _ in range(50):
        run.step(padding=3)

    assert run.rows.lengths[run.rows.nobody] == 0


def test_the_sign_for_nan_is_not_fed_back():
    run = Run(drawn(0, 3), drawn(1, 3), ahead=1)
    batch = run.plan()
    run.rows.update(batch, 2)
    run.rows.keep(run.rows.lay_out(batch, 6, 2), torch.tensor([-1, 5]))
    ahead = run.plan()
    run.rows.update(ahead, 2)
    ids = run.rows.decode(2).input_ids

    assert (int(ids[0]) >= 0, int(ids[1])) == (True, 5)


def test_after_a_step_that_failed_its_newcomers_its_order_and_every_token_are_sent_again():
    run = Run(drawn(0, 3))
    run.step()
    run.scheduler.add(newcomer := drawn(1, 3, max_tokens=9))
    failed = run.plan()
    run.rows.update(failed, 2)
    rows = run.rows  # nobody knows what arrived, and how far the step came
    for state in (rows.order, rows.tokens, rows.lengths, rows.seeds[newcomer.row :], rows.top_k[newcomer.row :]):
        state.fill_(1)
    rows.page_tables[newcomer.row].fill_(9)
    run.scheduler.undo(failed)
    rows.forget(failed)
    rows.tokens[rows.nobody] = rows.lengths[rows.nobody] = 0

    run.step(padding=1)
    run.step()


def test_a_step_laid_out_twice_is_the_same():
    run = Run(drawn(0, 7))
    batch = run.plan()
    for _ in range(2):
        run.rows.update(batch, 3)
        run.check(run.rows.lay_out(batch, 12, 3), batch)


def test_a_step_is_laid_out_in_memory_that_is_given():
    run = Run(drawn(0, 7))
    batch, memory = run.plan(), torch.zeros(laid_out_len(12, 3), dtype=torch.int64)
    run.rows.update(batch, 3)
    run.rows.lay_out(batch, 12, 3, memory)

    run.check(run.rows.laid_out(memory, 12, 3), batch)


def test_a_step_of_nobody_after_clear_writes_to_nobodys_row():
    run = Run(r := drawn(0, 3), page_size=16)
    run.step()
    run.step()
    before = run.rows.lengths[r.row].clone()
    run.rows.clear()
    run.rows.keep(run.rows.decode(3), torch.tensor([1, 2, 3]))
    assert run.rows.lengths[r.row] == before
    run.step()


@pytest.mark.parametrize("sizes", [[1], [3, 0, 5], [2000, 7], [1, 2, 3000]])
def test_a_mailbox_hands_on_what_it_was_given_whatever_came_before(sizes):
    mailbox = Mailbox(CPU)
    for start in (0, 10):
        parts = [range(start, start + n) for n in sizes]
        assert [part.tolist() for part in mailbox.send(parts)] == [list(part) for part in parts]
