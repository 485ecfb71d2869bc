"""Task 09.8: a rank that only follows ends each step in the state of the one that leads.

Both runners have the whole model, and the same one, so that what they hold can be compared number by number.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl.engine.lead import CAPTURE, EAGER, REPLAY, Leader
from minisgl.engine.runner import StepRunner
from tests.ch08_cuda_graphs.scene import DEVICE, ChunkAttention, learn, new_request, new_runner, step
from tests.helpers import tiny_model

WAYS = {"eager": None, "graphs": ChunkAttention}
FIELDS = ("page_tables", "tokens", "lengths", "order", "seeds", "temperature", "top_k")


@pytest.fixture(scope="module")
def model():
    return tiny_model().to(DEVICE)


class Told:
    """A follower's end of a group: what rank 0 broadcasts is what the test says."""

    rank, size, in_graphs = 1, 2, False

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.asked = 0

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        self.asked += 1
        assert self.tokens, "this command has by_host = 0: every rank chooses, and rank 0 broadcasts nothing"
        return torch.tensor(self.tokens, dtype=x.dtype, device=x.device)


class Pair:
    """A runner that leads and one that follows, which gets each command at once, in arrays that are used again."""

    def __init__(self, model: Any, in_graph: Any = None) -> None:
        self.leading, self.following = (new_runner(model, in_graph=in_graph) for _ in range(2))
        self.kinds: list[int] = []
        self.told = self.following.comm = Told()
        self.leading.lead(Leader(self.send, self.leading.rows))

    def send(self, command: Any) -> None:
        copies = [array.copy() for array in command]
        self.kinds.append(int(copies[0][0]))
        self.following.follow(copies)
        for array in copies:
            array.fill(-7)  # as the ring does, whose slots are written again

    def run(self, *parts: Any, moved: Any = ()) -> list[int]:
        """A step on both ranks."""
        batch = step(*parts, moved=moved)
        tokens = self.leading.launch(batch).tokens()
        learn(batch, tokens)
        return tokens

    def prefill(self, *prompts: int, **params: Any) -> list[Any]:
        """Requests with prompts of so many tokens, computed in one step."""
        made = [new_request(i, n, pages=range(5 * i + 1, 5 * i + 6), **params) for i, n in enumerate(prompts)]
        self.run(*((r, 0, r.prompt_len) for r in made), moved=[(r, 0) for r in made])
        return made

    def decode(self, *requests: Any, steps: int = 1) -> None:
        for _ in range(steps):
            self.run(*((r, len(r.tokens) - 1, 1) for r in requests))

    def check(self, *requests: Any) -> None:
        """What is held on both ranks is the same."""
        for field in FIELDS:
            ours, theirs = (getattr(runner.rows, field) for runner in (self.leading, self.following))
            assert torch.equal(theirs, ours), f"rows.{field} is\n{theirs}\nwhere rank 0 has\n{ours}"
        for r in requests:
            ours, theirs = (kv_of(runner, r) for runner in (self.leading, self.following))
            assert not ours.isnan().any()
            assert torch.equal(theirs, ours), f"K and V of request {r.id} are others than rank 0's"


def kv_of(runner: StepRunner, request: Any) -> torch.Tensor:
    """K and V of the tokens that a request has computed, in all layers."""
    pool, size = runner.pool, runner.pool.page_size
    at = torch.arange(len(request.tokens) - 1)
    slots = torch.tensor(request.pages)[at // size] * size + at % size
    layers = [pool.layer(i) for i in range(runner.model.config.num_layers)]
    return torch.stack([tensor[slots.to(tensor.device)] for layer in layers for tensor in layer])


# Steps launched kernel by kernel


def test_a_prompt(model):
    pair = Pair(model)
    pair.check(*pair.prefill(7))
    assert pair.kinds == [EAGER]


def test_prompts_of_several_requests(model):
    pair = Pair(model)
    pair.check(*pair.prefill(7, 3, 1, 12))


def test_decodes_read_what_the_steps_before_them_left(model):
    pair = Pair(model)
    requests = pair.prefill(7, 3, 12)
    pair.decode(*requests, steps=8)
    pair.check(*requests)


def test_a_decode_beside_a_prompts_chunk(model):
    pair = Pair(model)
    [old] = pair.prefill(6)
    new = new_request(1, 11, pages=[20, 21, 22, 23])
    pair.run((old, 6, 1), (new, 0, 5), moved=[(new, 0)])
    pair.run((new, 5, 6), (old, 7, 1))
    pair.check(old, new)


def test_requests_leave_and_change_places(model):
    pair = Pair(model)
    a, b, c = pair.prefill(7, 3, 5)
    pair.decode(c, a)
    pair.decode(b)
    pair.decode(b, c, a)
    pair.check(a, b, c)


def test_attention_hears_of_the_same_step(model):
    """How many tokens each sequence brings, and how many it has: a backend plans its launches by them."""
    heard: dict[str, list[Any]] = {"leading": [], "following": []}
    pair = Pair(model)
    for name, log in heard.items():
        runner = getattr(pair, name)

        def attention(pool, rows, work=None, log=log, known=runner.attention):
            log.append((list(rows.query_lens), list(rows.kv_lens)))
            return known(pool, rows, work)

        runner.attention = attention
    pair.decode(*pair.prefill(7, 3))
    assert heard["following"] == heard["leading"] == [([7, 3], [7, 3]), ([1, 1], [8, 4])]


# Steps from a graph


def test_a_size_is_captured_on_both_ranks_before_it_is_replayed(model):
    pair = Pair(model, ChunkAttention)
    pair.decode(*pair.prefill(7, 3), steps=2)

    assert pair.kinds == [CAPTURE, REPLAY, CAPTURE, REPLAY, REPLAY]
    assert set(pair.following._graphs._graphs) == set(pair.leading._graphs._graphs)


def test_replayed_decodes_leave_the_same(model):
    pair = Pair(model, ChunkAttention)
    requests = pair.prefill(7, 3, 12)
    pair.decode(*requests, steps=8)
    pair.check(*requests)


def test_a_replayed_step_with_prompts_runs_this_steps_tokens(model):
    """The graph reads the memory that it was captured with, so that is where they must be."""
    pair = Pair(model, ChunkAttention)
    [old] = pair.prefill(6)
    for row, length in enumerate((11, 5, 8), 1):  # by the same graph
        new = new_request(row, length, pages=[20 + 5 * row + i for i in range(3)])
        pair.run((old, len(old.tokens) - 1, 1), (new, 0, length), moved=[(new, 0)])
        pair.check(old, new)


def test_whoever_left_is_gone_from_a_replay(model):
    pair = Pair(model, ChunkAttention)
    a, b, c = pair.prefill(7, 3, 5)
    pair.decode(a, b, c, steps=2)
    pair.decode(b, steps=2)
    pair.decode(c, b, steps=2)
    pair.check(a, b, c)


# What is chosen


@pytest.mark.parametrize("in_graph", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("params", [{"temperature": 0.9}, {"temperature": 5.0, "top_k": 2}], ids=["drawn", "filtered"])
def test_nobody_tells_a_rank_what_it_can_choose_itself(model, params, in_graph):
    """The same logits, seed and position give the same token, so no broadcast is needed."""
    pair = Pair(model, in_graph)
    requests = pair.prefill(7, 3, **params)
    pair.decode(*requests, steps=6)

    pair.check(*requests)
    assert pair.told.asked == 0, "a broadcast that rank 0 takes no part in waits for ever"


def test_what_only_rank_0_can_choose_is_taken_from_it(model):
    """Penalties count tokens, which are on rank 0's host."""
    pair = Pair(model)
    pair.told.tokens = [42]
    [request] = pair.prefill(7, repetition_penalty=1.5)

    assert pair.told.asked == 1, "rank 0 broadcasts its choice, and this rank takes no part"
    assert pair.following.rows.tokens[request.row].item() == 42
    assert pair.following.rows.lengths[request.row].item() == 7


def test_filters_hold_beside_a_choice_of_rank_0(model):
    pair, filtered = Pair(model), []
    choose = pair.following._choose
    pair.following._choose = lambda logits, inputs, *flags: filtered.append(flags) or choose(logits, inputs, *flags)
    pair.told.tokens = [42]

    pair.prefill(7, temperature=1.0, top_k=5)
    pair.prefill(7, repetition_penalty=1.5)
    pair.prefill(7, temperature=1.0, top_k=5, repetition_penalty=1.5)

    assert [tuple(map(bool, flags)) for flags in filtered] == [(True, False), (False, True), (True, True)]
