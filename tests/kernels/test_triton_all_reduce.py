"""The all-reduce over peer memory: in the interpreter, where the test plays the other ranks, and on a GPU.

The interpreter runs one rank's programs one after another, and none can wait for another rank. So before each call the
test puts the others' rows into the rank's inbox, as they would have.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from minisgl_kernels import triton as ops
from minisgl_kernels.launches import overlapping
from minisgl_kernels.triton.all_reduce import (
    CLEAR,
    FINISHED,
    GENERATION,
    GENERATIONS,
    USED_BYTES,
    Inbox,
    all_reduce,
    all_reduce_add_rms_norm,
)
from minisgl_kernels.triton.norm import add_rms_norm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS, SLOT_BYTES = 1e-5, 1 << 14
INTEGERS = {2: torch.int16, 4: torch.int32}


@pytest.fixture(params=[torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
def dtype(request):
    if reason := ops.why_unavailable(DEVICE, request.param):
        pytest.skip(reason)
    return request.param


@pytest.fixture(autouse=True)
def poisoned():
    """What an op allocates and does not write is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


class Ranks:
    """A group's inboxes in plain memory, and what the kernels of each rank know of them."""

    def __init__(self, size: int, slot_bytes: int = SLOT_BYTES) -> None:
        shape = size, GENERATIONS, size, slot_bytes // 2
        self.words = torch.full(shape, CLEAR - (1 << 16), dtype=torch.int16, device=DEVICE)  # of whom, when, from whom
        pointers = torch.tensor([inbox.data_ptr() for inbox in self.words], device=DEVICE)
        self.states = torch.zeros(size, 3, dtype=torch.int32, device=DEVICE)
        self.broken = torch.zeros(1, dtype=torch.int32, pin_memory=DEVICE.type == "cuda")
        self.inboxes = [Inbox(pointers, self.states[rank], self.broken, rank, slot_bytes) for rank in range(size)]

    def put(self, owner: int, generation: int, sender: int, x: torch.Tensor) -> None:
        """As the sender would: its x is in the owner's inbox."""
        self.words[owner, generation, sender, : x.nbytes // 2] = sent(x).view(torch.int16).flatten()

    def has(self, owner: int, generation: int, sender: int, x: torch.Tensor) -> bool:
        """Whether x, and nothing but x, is there."""
        words = x.nbytes // 2
        slot = self.words[owner, generation, sender]
        return torch.equal(slot[:words], sent(x).view(torch.int16).flatten()) and self.is_clear(slot[words:])

    def is_clear(self, words: torch.Tensor) -> bool:
        return bool((words == CLEAR - (1 << 16)).all())

    def break_all(self) -> None:
        self.broken[0] = 1

    def mend(self) -> None:
        """As at first."""
        self.states.zero_()
        self.broken.zero_()
        self.words.fill_(CLEAR - (1 << 16))

    def state(self, rank: int) -> list[int]:
        return self.inboxes[rank].state.tolist()


def sent(x: torch.Tensor) -> torch.Tensor:
    """x with 0 in place of what would mean "not yet"."""
    words = x.contiguous().view(INTEGERS[x.itemsize])
    clear = {2: CLEAR - (1 << 16), 4: (CLEAR << 16 | CLEAR) - (1 << 32)}[x.itemsize]
    return words.masked_fill(words == clear, 0).view(x.dtype)


def draw(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).to(dtype)


def total_of(xs: list[torch.Tensor]) -> torch.Tensor:
    """In fp32, in the order of ranks, rounded once."""
    total = torch.zeros_like(xs[0], dtype=torch.float32)
    for x in xs:
        total = total + x.float()
    return total.to(xs[0].dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, but any NaN is the same as any other."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0), b.nan_to_num(0))


def in_turn(ranks: Ranks, call: int, xs: list[torch.Tensor], op: Any = all_reduce, *args: Any) -> list[Any]:
    """Call `call` of every rank, one rank after another; what is sent is checked and taken back, but for the reader."""
    results, size, generation = [], len(xs), call % GENERATIONS
    ranks.words[:, generation].fill_(CLEAR - (1 << 16))  # what those before have sent, checked below
    for rank, x in enumerate(xs):
        for sender in set(range(size)) - {rank}:
            ranks.put(rank, generation, sender, xs[sender])
        results.append(op(x, *args, ranks.inboxes[rank]))
        assert all(ranks.has(owner, generation, rank, x) for owner in range(size))
    return results


# What one call does


@pytest.mark.parametrize("hidden", [1, 36, 576, 1024])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_gets_the_same_sum(size, hidden, dtype):
    ranks, xs = Ranks(size), [draw(3, hidden, dtype=dtype, seed=rank) for rank in range(size)]

    sums = in_turn(ranks, 0, xs)

    assert all(torch.equal(total, total_of(xs)) for total in sums)


@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("hidden", [36, 576, 1024])
def test_sum_addition_and_norm_are_rounded_as_one_by_one(hidden, with_residual, dtype):
    ranks, xs = Ranks(3), [draw(2, hidden, dtype=dtype, seed=rank) for rank in range(3)]
    weight, residual = draw(hidden, dtype=dtype, seed=8), draw(2, hidden, dtype=dtype, seed=9)
    residual = residual if with_residual else None
    whole = total_of(xs)
    _, total = add_rms_norm(whole, residual, weight, EPS)
    [expected] = in_turn(Ranks(1), 0, [whole], all_reduce_add_rms_norm, residual, weight, EPS)

    for normed, stream in in_turn(ranks, 0, xs, all_reduce_add_rms_norm, residual, weight, EPS):
        assert torch.equal(stream, total)
        assert torch.equal(normed, expected[0])


@pytest.mark.parametrize("hidden", [36, 576, 1024, 5120])
def test_the_norm_is_that_of_add_rms_norm(hidden, dtype):
    x, residual = draw(2, hidden, dtype=dtype, seed=1), draw(2, hidden, dtype=dtype, seed=2)
    weight = draw(hidden, dtype=dtype, seed=3)
    expected, _ = add_rms_norm(x, residual, weight, EPS)
    ranks = Ranks(1, 1 << 17)

    normed, _ = all_reduce_add_rms_norm(x, residual, weight, EPS, ranks.inboxes[0])

    # The squares of a row may be added in another order, and then two roundings may go the other way.
    torch.testing.assert_close(normed, expected, rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_rows_may_be_a_part_of_wider_ones_and_x_stays_as_it_is():
    ranks = Ranks(2)
    wide = draw(3, 100, dtype=torch.float32, seed=0)
    before = wide.clone()
    ranks.put(0, 0, 1, torch.ones(3, 40, device=DEVICE))

    assert torch.equal(all_reduce(wide[:, 7:47], ranks.inboxes[0]), before[:, 7:47] + 1)
    assert torch.equal(wide, before)


SPECIAL = [-0.0, 0.0, float("nan"), float("inf"), -float("inf"), 65504.0, -(2.0**-24), 2.0**-24]


def test_what_no_other_value_would_survive_is_sent_too(dtype):
    ranks = Ranks(2)
    x = torch.tensor([SPECIAL] * 2, dtype=dtype, device=DEVICE)
    y = torch.tensor([SPECIAL, [1.0] * 8], dtype=dtype, device=DEVICE)

    for total in in_turn(ranks, 0, [x, y]):
        assert same(total, total_of([x, y]))


def test_the_pattern_of_an_empty_slot_is_sent_as_zero(dtype):
    ranks = Ranks(2)
    x = torch.full((2, 24), CLEAR - (1 << 16), dtype=torch.int16, device=DEVICE).view(dtype)

    for total in in_turn(ranks, 0, [x, x]):
        assert torch.equal(total, torch.zeros_like(x))


def test_no_rows_are_no_call():
    ranks = Ranks(2)

    assert all_reduce(torch.empty(0, 36, device=DEVICE), ranks.inboxes[0]).shape == (0, 36)
    assert ranks.state(0) == [0] * 3


@pytest.mark.parametrize("shape", [(129, 32), (1, 20_000)], ids=str)
def test_what_is_too_large_is_refused(shape):
    inbox = Ranks(2, SLOT_BYTES if shape[0] > 1 else 1 << 17).inboxes[0]
    x = torch.zeros(shape, device=DEVICE)

    assert not inbox.takes(x)
    with pytest.raises(ValueError, match="an inbox takes at most"):
        all_reduce(x, inbox)


def test_another_shape_of_the_residual_is_refused():
    x = torch.zeros(2, 36, device=DEVICE)
    with pytest.raises(ValueError, match=r"x is \[2, 36\] and the residual \[1, 36\]"):
        all_reduce_add_rms_norm(x, x[:1], x[0], EPS, Ranks(2).inboxes[0])


def test_in_a_broken_group_nobody_waits():
    ranks = Ranks(2)
    ranks.break_all()

    for _ in range(4):  # no data of rank 1 at all
        assert all_reduce(torch.ones(2, 36, device=DEVICE), ranks.inboxes[0]).shape == (2, 36)


# What it leaves for the next


def test_the_state_moves_on():
    ranks, seen = Ranks(2), []
    for call, rows in enumerate([3, 1, 2, 5]):
        in_turn(ranks, call, [torch.ones(rows, 36, device=DEVICE)] * 2)
        seen.append(ranks.state(1))

    used = [rows * 36 * 4 for rows in (3, 1, 2, 5)]
    assert [state[GENERATION] for state in seen] == [1, 2, 0, 1]
    assert [state[USED_BYTES] for state in seen] == used
    assert all(state[FINISHED] == 0 for state in seen)


@pytest.mark.parametrize(("before", "now"), [(1, 5), (5, 1), (5, 5)])
@pytest.mark.parametrize("hidden", [33, 36])
def test_a_call_clears_what_the_one_before_has_read(hidden, before, now, dtype):
    ranks = Ranks(3)
    in_turn(ranks, 0, [draw(before, hidden, dtype=dtype, seed=rank) for rank in range(3)])
    assert not ranks.is_clear(ranks.words[:, 0])

    in_turn(ranks, 1, [draw(now, hidden, dtype=dtype, seed=rank) for rank in range(3)])

    assert ranks.is_clear(ranks.words[:, 0])
    assert ranks.is_clear(ranks.words[:, 2])


def test_calls_of_all_sizes_and_kinds_follow_each_other(dtype):
    choose, size = random.Random(0), 3
    ranks, most = Ranks(size), SLOT_BYTES // (576 * dtype.itemsize)
    for call in range(12):
        hidden = choose.choice([36, 576])
        rows = choose.randint(1, most)
        xs = [draw(rows, hidden, dtype=dtype, seed=100 * call + rank) for rank in range(size)]
        if choose.random() < 0.5:
            results = in_turn(ranks, call, xs)
        else:
            weight = torch.ones(hidden, dtype=dtype, device=DEVICE)
            results = [total for _, total in in_turn(ranks, call, xs, all_reduce_add_rms_norm, None, weight, EPS)]
        assert all(torch.equal(total, total_of(xs)) for total in results)


def test_dtypes_may_take_turns():
    ranks = Ranks(2)
    for call, dtype in enumerate([torch.float32, torch.float16] * 4):
        xs = [draw(3, 36, dtype=dtype, seed=10 * call + rank) for rank in range(2)]
        assert all(torch.equal(total, total_of(xs)) for total in in_turn(ranks, call, xs))


# Side by side on one GPU: each rank is a stream, and its kernels wait for those of the others


on_a_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs an NVIDIA GPU")


class Streams:
    """Ranks whose calls are an all-reduce and one with the norm. All that is launched has been launched before: what is
    loaded, and memory that is asked of the driver, could wait for kernels that wait for those that are not launched."""

    def __init__(self, size: int, most: int, dtype: torch.dtype, pdl: bool) -> None:
        self.ranks, self.pdl = Ranks(size, 1 << 19), pdl
        self.streams: list[Any] = [torch.cuda.Stream() for _ in range(size)]
        self.xs = [torch.zeros(most, 1024, dtype=dtype, device=DEVICE) for _ in range(size)]
        self.norm = draw(most, 1024, dtype=dtype, seed=8), draw(1024, dtype=dtype, seed=9)
        self.graphs: dict[tuple[int, int], Any] = {}  # by rank and rows, with what it returns
        self.alone = Ranks(1, 1 << 19)

    def calls(self, rank: int, rows: int) -> list[torch.Tensor]:
        x, inbox, (residual, weight) = self.xs[rank][:rows], self.ranks.inboxes[rank], self.norm
        with overlapping(self.pdl):
            return [all_reduce(x, inbox), *all_reduce_add_rms_norm(x, residual[:rows], weight, EPS, inbox)]

    def expected(self, rows: int) -> list[torch.Tensor]:
        total, (residual, weight) = total_of([x[:rows] for x in self.xs]), self.norm
        return [total, *all_reduce_add_rms_norm(total, residual[:rows], weight, EPS, self.alone.inboxes[0])]

    def get_ready(self, sizes: list[int], in_graphs: bool) -> None:
        self.ranks.break_all()
        for rank, stream in enumerate(self.streams):
            self.calls(rank, 1)
            for rows in sizes if in_graphs else []:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    results = self.calls(rank, rows)
                graph.replay()
                self.graphs[rank, rows] = graph, results
        torch.cuda.synchronize()
        for rank, stream in enumerate(self.streams):  # capturing has given free memory back
            with torch.cuda.stream(stream):
                held = [self.calls(rank, rows) for rows in sizes]
                held.append([torch.empty(1 << n, dtype=self.xs[0].dtype, device=DEVICE) for n in (10, 19, 22)])
                del held
        torch.cuda.synchronize()
        self.ranks.mend()

    def launch(self, rank: int, rows: int, in_graph: bool) -> list[torch.Tensor]:
        with torch.cuda.stream(self.streams[rank]):
            if not in_graph:
                return self.calls(rank, rows)
            graph, results = self.graphs[rank, rows]
            graph.replay()
            return results


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("pdl", [False, True], ids=["", "pdl"])
@pytest.mark.parametrize("in_graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_on_streams_of_one_gpu_wait_for_each_other(size, in_graphs, pdl, dtype):
    choose, sizes = random.Random(size), [1, 2, 24]
    group = Streams(size, sizes[-1], dtype, pdl)
    group.get_ready(sizes, in_graphs)
    for call in range(60):
        rows = choose.choice(sizes)
        for rank, x in enumerate(group.xs):
            x.copy_(draw(*x.shape, dtype=dtype, seed=size * call + rank))
        expected = group.expected(rows)
        in_graph = in_graphs and choose.random() < 0.7  # and single launches between graphs
        torch.cuda.synchronize()

        results = [group.launch(rank, rows, in_graph) for rank in choose.sample(range(size), size)]

        torch.cuda.synchronize()
        for found in results:
            assert all(map(torch.equal, found, expected)), (call, rows)


@pytest.mark.gpu
@on_a_gpu
def test_who_waits_for_a_rank_that_is_gone_is_let_go():
    group = Streams(2, 1, torch.float16, pdl=False)
    group.get_ready([1], in_graphs=False)
    group.launch(0, 1, in_graph=False)
    assert not group.streams[0].query()

    group.ranks.break_all()

    torch.cuda.synchronize()
    assert group.ranks.state(0)[FINISHED] == 0
