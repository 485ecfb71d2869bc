"""Runs planned steps with everything on the device: the tokens that a step chose are read later, by who wants them.

The model reads the rows (engine.rows), and what it chooses goes back there, so that the next step can be launched
before the host has seen a token. Steps of a fitting size are replayed from a graph (engine.graph).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
from tqdm import tqdm

from minisgl.core import Batch, ForwardBatch, PagedRows, WorkCounts
from minisgl.distributed.comm import ALONE, Comm
from minisgl.engine.graph import StepGraphs, bucket_for, buckets, token_buckets
from minisgl.engine.lead import CAPTURE, REPLAY, Command, Leader
from minisgl.engine.rows import DeviceRows, StepInputs, laid_out_len
from minisgl.engine.sampler import adjust, append_logprobs
from minisgl.kvcache.mha_pool import MHAPool
from minisgl.models.llama import LlamaForCausalLM

Key = tuple[int, int, bool]  # tokens (0: one for each place), places of the batch, whether logits are filtered


@dataclass
class Flight:
    """A step on its way: what was planned, and a wait for the tokens that it chose, one a request."""

    batch: Batch
    tokens: Callable[[], list[int]]


class StepRunner:
    """Launches steps and returns at once.

    Args:
        rows: what the device keeps of the running requests.
        attention: the backend's class.
        ops: where sampling comes from.
        work: where work is counted.
        comm: to the ranks that hold the model's other shards.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        pool: MHAPool,
        rows: DeviceRows,
        attention: Any,
        ops: Any,
        work: WorkCounts,
        comm: Comm = ALONE,
    ) -> None:
        self.model, self.pool, self.rows, self.ops, self.work = model, pool, rows, ops, work
        self.attention, self.comm = attention, comm
        self.leader: Leader | None = None
        self.eager_steps = Counter[str]()  # that no graph held, by reason
        self._graphs: StepGraphs | None = None
        self._token_bytes = pool.kv[:, :, 0, 0].nbytes  # K and V of a token in all layers
        device, pinned = pool.kv.device, pool.kv.is_cuda
        # Two, since a step may be launched before the tokens of the one before have been read.
        self._read = cycle([torch.empty(rows.nobody, dtype=torch.int64, pin_memory=pinned) for _ in range(2)])
        self._events = cycle([_new_event(device) for _ in range(2)])

    def use_graphs(self, attention: Any, lazily: bool, most_tokens: int) -> None:
        """From now on replay what fits: steps of one token a request, and mixed ones of up to most_tokens.

        Args:
            attention: the backend's class in graphs.
            lazily: capture a size when it is first met, and not now.
        """
        self._in_graph, most = attention, self.rows.nobody
        self._graphs, self._sizes = StepGraphs(self.model.device), buckets(most)
        self._mixed_sizes = [size for size in (16,) if size < most] + [most]
        self._token_sizes = token_buckets(most_tokens) if attention.takes_chunks else []
        longest = laid_out_len(max(self._token_sizes, default=0), most)
        self._laid_out = torch.zeros(longest, dtype=torch.int64, device=self.model.device)
        if not lazily:  # the largest first: the others find room in its memory
            keys = [(n, size, False) for n in self._token_sizes[::-1] for size in self._mixed_sizes[::-1]]
            keys += [(0, size, False) for size in self._sizes[::-1]]
            for key in tqdm(keys, desc="graphs", unit="graph", disable=None, leave=False):
                self.capture(key)

    def lead(self, leader: Leader) -> None:
        """From now on the other ranks are told what to run."""
        self.leader = leader
        if self._graphs is not None:
            self._graphs.before_replay = leader.replay

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Flight:
        """Start a step; its tokens can be had from the flight, -1 where the logits hold NaN."""
        by_host = batch.by_host
        filtered = any(request.filtered for request in batch.requests)
        key = None if by_host else self._key(batch, filtered)
        if key is None and self._graphs is not None:
            self.eager_steps[by_host or "size"] += 1
        tokens = self._eager(batch, filtered, bool(by_host)) if key is None else self._replay(batch, key)
        self.work.steps += 1
        self.work.tokens_computed += batch.total_tokens
        return Flight(batch, self._fetch(tokens[: len(batch.requests)]))

    def _key(self, batch: Batch, filtered: bool) -> Key | None:
        """The graph that holds a step; None if there is none."""
        n, total = len(batch.requests), batch.total_tokens
        if self._graphs is None:
            return None
        if total == n:
            return 0, bucket_for(n, self._sizes), filtered
        num_tokens = bucket_for(total, self._token_sizes)
        return (num_tokens, bucket_for(n, self._mixed_sizes), filtered) if num_tokens else None

    def capture(self, key: Key) -> None:
        """Record the step of a key. Nobody is in the batch meanwhile: what it writes goes to the dummy page."""
        assert self._graphs is not None
        num_tokens = key[0]
        if self.leader:
            self.leader.capture(key)
        self._graphs.open_pool()
        self.rows.clear()
        self._laid_out.zero_()
        self._laid_out[2 * num_tokens : 3 * num_tokens] = self.rows.nobody
        self._graphs.capture(key, partial(self._step, key))

    @torch.inference_mode()
    def rehearse(self, num_tokens: int) -> int:
        """Run a step of so many tokens of nobody, in all places there are; the bytes that it took at its most."""
        size = self.rows.nobody
        sent = torch.zeros(laid_out_len(num_tokens, size), dtype=torch.int64, device=self.model.device)
        sent[2 * num_tokens : 3 * num_tokens] = size
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        inputs = self.rows.laid_out(sent, num_tokens, size)
        self._choose(self._logits(inputs, self.attention, [num_tokens] * size, [], WorkCounts()), inputs, True)
        return torch.cuda.max_memory_allocated() - before

    @torch.inference_mode()
    def _step(self, key: Key) -> torch.Tensor:
        """A whole step on memory that stays; returns the tokens that it chose."""
        num_tokens, size, filtered = key
        if num_tokens:
            sent = self._laid_out[: laid_out_len(num_tokens, size)]
            inputs = self.rows.laid_out(sent, num_tokens, size)
        else:
            inputs = self.rows.decode(size)
        query_lens = [num_tokens or 1] * size  # at most
        logits = self._logits(inputs, self._in_graph, query_lens, [], WorkCounts())
        return self._choose(logits, inputs, filtered)

    def _replay(self, batch: Batch, key: Key) -> torch.Tensor:
        """Run a batch by the graph of its key, captured first if it is new; the tokens, padding included."""
        assert self._graphs is not None
        if key not in self._graphs:
            self.capture(key)
        num_tokens, size, _ = key
        self.rows.update(batch, size)
        if num_tokens:
            self.rows.lay_out(batch, num_tokens, size, self._laid_out[: laid_out_len(num_tokens, size)])
        self.work.graph_steps += 1
        self.work.kv_bytes_read += self._token_bytes * (sum(batch.starts) + batch.total_tokens)
        self.work.kv_bytes_written += self._token_bytes * batch.total_tokens
        return self._graphs.replay(key)

    def _eager(self, batch: Batch, filtered: bool, by_host: bool) -> torch.Tensor:
        """A step of just its own size, launched kernel by kernel. Some choices need what only the host knows."""
        n, total = len(batch.requests), batch.total_tokens
        self.rows.update(batch, n)
        inputs = self.rows.decode(n) if total == n else self.rows.lay_out(batch, total, n)
        kv_lens = [start + num_tokens for _, start, num_tokens in batch]
        inputs.page_table = inputs.page_table[:, : -(-max(kv_lens) // self.pool.page_size)]  # some copy all of it
        if self.leader:
            self.leader.eager(filtered, by_host, batch.num_tokens, kv_lens)
        logits = self._logits(inputs, self.attention, batch.num_tokens, kv_lens, self.work)
        tokens = self._choose(adjust(logits, batch.requests) if by_host else logits, inputs, filtered, by_host)
        if by_host:
            append_logprobs(logits, batch, tokens.tolist())
        return tokens

    @torch.inference_mode()
    def follow(self, command: Command) -> None:
        """Run what rank 0 runs (see engine.lead), on this rank's shard. The arrays may be reused afterwards."""
        kind, *what = command[0].tolist()
        if kind == CAPTURE:
            self.capture(_key(what))
            return
        changes, laid_out = command[1:3]
        if kind == REPLAY:
            assert self._graphs is not None
            self.rows.follow(changes, laid_out, self._laid_out[: len(laid_out)])
            self._graphs.replay(_key(what))
            return
        num_tokens, kv_lens = command[3].tolist(), command[4].tolist()
        n, sent = len(num_tokens), self.rows.follow(changes, laid_out)
        inputs = self.rows.laid_out(sent[0], sum(num_tokens), n) if sent else self.rows.decode(n)
        inputs.page_table = inputs.page_table[:, : -(-max(kv_lens) // self.pool.page_size)]
        logits = self._logits(inputs, self.attention, num_tokens, kv_lens, self.work)
        self._choose(logits, inputs, *map(bool, what))

    def _logits(
        self, inputs: StepInputs, attention: Any, query_lens: list[int], kv_lens: list[int], work: WorkCounts
    ) -> torch.Tensor:
        paged = PagedRows(inputs.slots, inputs.page_table, query_lens, kv_lens, inputs.query_starts, inputs.kv_lens)
        attend = attention(self.pool, paged, work)
        return self.model(ForwardBatch(inputs.input_ids, inputs.positions, attend, inputs.last_rows))

    def _choose(self, logits: torch.Tensor, inputs: StepInputs, filtered: bool, by_host: bool = False) -> torch.Tensor:
        """Sample; ranks with the same logits choose the same. by_host: only rank 0 has those that count."""
        filters = self.rows.filters(inputs.rows) if filtered else []
        tokens: torch.Tensor = self.ops.sample(logits, inputs.temperature, inputs.seeds, inputs.kv_lens, *filters)
        if by_host:
            tokens = self.comm.broadcast(tokens)
        self.rows.keep(inputs, tokens)
        return tokens

    def _fetch(self, tokens: torch.Tensor) -> Callable[[], list[int]]:
        """Send tokens to the host; calling what is returned waits for them."""
        here, event = next(self._read)[: len(tokens)], next(self._events)
        here.copy_(tokens, non_blocking=True)
        if event is None:
            return here.tolist
        event.record()

        def wait() -> list[int]:
            event.synchronize()
            return here.tolist()

        return wait


def _key(numbers: list[int]) -> Key:
    num_tokens, size, filtered = numbers
    return num_tokens, size, bool(filtered)


def _new_event(device: torch.device) -> Any:
    """What is recorded behind a copy, and waited for; None on a CPU, where a copy is over when it returns."""
    new = {"cuda": torch.cuda.Event, "mps": torch.mps.event.Event}.get(device.type)
    return new and new()
