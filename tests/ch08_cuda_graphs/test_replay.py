"""Task 08.6: a planned step is replayed from a graph, with the tokens of the same step run kernel by kernel."""

from __future__ import annotations

import pytest
import torch

from minisgl.attention.torch_backend import PaddedAttention
from tests.ch08_cuda_graphs.scene import (
    DEVICE,
    ChunkAttention,
    Sent,
    eager,
    learn,
    new_request,
    new_runner,
    replayed,
    step,
)
from tests.helpers import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model().to(DEVICE)


def prefilled(runner, *numbers, **params):
    """Requests in these rows whose prompts have been computed, in a step of their own."""
    requests = [
        new_request(row, prompt=3 + row, pages=[4 * row + i for i in (3, 1, 2, 4)], **params) for row in numbers
    ]
    batch = step(*((r, 0, r.prompt_len) for r in requests), moved=[(r, 0) for r in requests])
    learn(batch, eager(runner, batch))
    return requests


def decode(requests, moved=()):
    """The step after: one token for each."""
    return step(*((r, len(r.tokens) - 1, 1) for r in requests), moved=moved)


def go_on(run, runner, requests, steps):
    for _ in range(steps):
        batch = decode(requests)
        learn(batch, run(runner, batch))


@pytest.mark.parametrize("numbers", [(0,), (0, 1), (0, 1, 2), (4, 2, 0, 1, 3)], ids=len)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_replays_choose_the_tokens_of_eager_steps(model, numbers, temperature):
    one, other = new_runner(model), new_runner(model, in_graph=PaddedAttention)
    expected, actual = (prefilled(runner, *numbers, temperature=temperature) for runner in (one, other))

    go_on(eager, one, expected, steps=6)
    go_on(replayed, other, actual, steps=6)

    assert [r.tokens for r in actual] == [r.tokens for r in expected], (
        "a capture empties the order: capture first, then update, with the key's size"
    )


def test_a_size_is_recorded_when_it_is_first_met_and_never_again(model):
    runner = new_runner(model, in_graph=PaddedAttention)
    requests = prefilled(runner, 0, 1, 2)

    for n in (3, 2, 3, 1, 3, 2):
        go_on(replayed, runner, requests[:n], steps=2)

    assert len(runner._graphs) == 3, "one graph of 1 place, one of 2 and one of 4"


def test_padding_writes_to_no_page_of_anybody(model):
    runner = new_runner(model, in_graph=PaddedAttention)
    requests = prefilled(runner, 0, 1, 2, 3)
    go_on(replayed, runner, requests, steps=2)
    left = requests.pop()  # it sits the next steps out; the graph is that of four places
    before = runner.pool.kv[:, :, left.pages].clone()
    length = runner.rows.lengths[left.row].item()

    go_on(replayed, runner, requests, steps=3)

    unchanged = torch.equal(runner.pool.kv[:, :, left.pages].nan_to_num(7), before.nan_to_num(7))
    assert unchanged, "a place that nobody takes still names a row: pass the key's size"
    assert runner.rows.lengths[left.row].item() == length
    used = {page for r in [*requests, left] for page in r.pages} | {0}
    free = [page for page in range(40) if page not in used]
    assert runner.pool.kv[:, :, free].isnan().all(), "a page that nobody has was written"


def test_who_comes_back_goes_on_where_it_was(model):
    one, other = new_runner(model), new_runner(model, in_graph=PaddedAttention)
    expected, actual = prefilled(one, 0, 1, 2, 3), prefilled(other, 0, 1, 2, 3)

    for run, runner, requests in ((eager, one, expected), (replayed, other, actual)):
        go_on(run, runner, requests, steps=2)
        go_on(run, runner, requests[1:], steps=2)
        go_on(run, runner, requests, steps=2)

    assert [r.tokens for r in actual] == [r.tokens for r in expected]


def test_a_new_page_is_known_before_the_step_that_writes_to_it(model):
    one, other = new_runner(model), new_runner(model, in_graph=PaddedAttention)
    for run, runner in ((eager, one), (replayed, other)):
        [request] = requests = prefilled(runner, 4)  # 7 tokens and one more: two pages are full
        del request.pages[2:]
        go_on(run, runner, requests, steps=1)
        request.pages.append(33)
        batch = decode(requests, moved=[(request, 2)])
        learn(batch, run(runner, batch))
        go_on(run, runner, requests, steps=2)

        assert runner.pool.kv[:, :, 33, 0].isfinite().all()
    assert runner.rows.page_tables[4, 2].item() == 33


def test_a_steady_decode_needs_nothing_from_the_host(model, monkeypatch):
    runner = new_runner(model, in_graph=PaddedAttention)
    requests = prefilled(runner, 0, 1, 2)
    go_on(replayed, runner, requests, steps=1)
    sent = Sent(monkeypatch)

    go_on(replayed, runner, requests, steps=3)

    assert sent.copies == []


def test_chunks_and_decodes_replay_side_by_side(model):
    """A second step of the same graph has other tokens, other lengths and other requests."""
    one, other = new_runner(model), new_runner(model, in_graph=ChunkAttention)
    found = []
    for run, runner in ((eager, one), (replayed, other)):
        decoding = prefilled(runner, 0, 1)
        tokens = []
        for row, cut in ((2, 3), (3, 5)):
            reading = new_request(row, prompt=9, pages=[20 + 4 * row + i for i in range(4)])
            for start, n in ((0, cut), (cut, 9 - cut)):
                batch = step(
                    *((r, len(r.tokens) - 1, 1) for r in decoding),
                    (reading, start, n),
                    moved=[(reading, 0)][: n * (start == 0)],
                )
                chosen = run(runner, batch)
                tokens.append(chosen[: 2 + (start > 0)])
                learn(batch, chosen)
            decoding.append(reading)
            decoding.pop(0)
        found.append(tokens)

    assert found[1] == found[0], "lay a mixed step out where the graph reads: in self._laid_out"
    assert len(other._graphs) == 1


def test_the_work_of_a_replay_is_counted(model):
    """What the requests read and write, not what padding does: 2 tokens, behind 3 and 4, over keys and values."""
    runner = new_runner(model, in_graph=PaddedAttention)
    requests = prefilled(runner, 0, 1)
    before = runner.work.graph_steps, runner.work.kv_bytes_read, runner.work.kv_bytes_written

    go_on(replayed, runner, requests, steps=1)

    shape = model.config
    a_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 4
    after = runner.work.graph_steps, runner.work.kv_bytes_read, runner.work.kv_bytes_written
    expected = [1, a_token * (4 + 5), a_token * 2]
    why = "one of graph_steps; all tokens of each sequence are read, those of this step written; padding is no work"
    assert [b - a for a, b in zip(before, after, strict=True)] == expected, why


def test_a_chunk_reads_the_keys_of_its_sequence_once_however_many_tokens_it_has(model):
    runner = new_runner(model, in_graph=ChunkAttention)
    requests = prefilled(runner, 0)
    reading = new_request(2, prompt=9, pages=[20, 21, 22])
    before = runner.work.kv_bytes_read, runner.work.kv_bytes_written

    replayed(runner, step((requests[0], 3, 1), (reading, 0, 6), moved=[(reading, 0)]))

    shape = model.config
    a_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 4
    after = runner.work.kv_bytes_read, runner.work.kv_bytes_written
    why = "4 and 6 tokens are read, not 1 · 4 + 6 · 6: once for each sequence; 1 and 6 are written"
    assert [b - a for a, b in zip(before, after, strict=True)] == [a_token * (4 + 6), a_token * (1 + 6)], why


def test_steps_and_tokens_are_left_to_launch_to_count(model):
    runner = new_runner(model, in_graph=PaddedAttention)
    requests = prefilled(runner, 0, 1)
    before = runner.work.steps, runner.work.tokens_computed

    batch = decode(requests)
    with torch.inference_mode():
        runner._replay(batch, runner._key(batch, False))

    assert (runner.work.steps, runner.work.tokens_computed) == before


def test_what_comes_back_has_the_graphs_size(model):
    runner = new_runner(model, in_graph=PaddedAttention)
    batch = decode(prefilled(runner, 0, 1, 2))

    with torch.inference_mode():
        tokens = runner._replay(batch, runner._key(batch, False))
    assert len(tokens) == 4, "3 requests in a graph of 4: `launch` cuts the padding off"
