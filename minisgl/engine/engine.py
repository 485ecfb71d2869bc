"""The engine: a model, a pool and a scheduler, and the loop that ties them. Ids in, ids out; it knows no text.

Nothing is global: two engines can live in one process.
"""

from __future__ import annotations

import os
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import minisgl_kernels as ops
import torch
from minisgl_kernels.launches import overlapping

from minisgl.attention import backend, needs_lengths
from minisgl.config import EngineConfig
from minisgl.core import Batch, FinishReason, Request, WorkCounts
from minisgl.distributed.comm import ALONE, Comm
from minisgl.engine.lead import Leader
from minisgl.engine.rows import DeviceRows
from minisgl.engine.runner import Flight, StepRunner
from minisgl.engine.trace import Trace, Traces
from minisgl.kvcache.cache_manager import CacheManager
from minisgl.kvcache.contiguous import kv_bytes_per_token
from minisgl.kvcache.mha_pool import MHAPool, pages_in
from minisgl.kvcache.pages import PageAllocator
from minisgl.kvcache.radix_cache import PREFIX_CACHES
from minisgl.models.llama import LlamaForCausalLM
from minisgl.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from minisgl.engine.group import Group


class Engine:
    """Runs many requests over one paged pool.

    Raises:
        ValueError: max_model_len exceeds the model's context, or the pool has no room.
    """

    def __init__(self, model: LlamaForCausalLM, config: EngineConfig, comm: Comm = ALONE) -> None:
        on_gpu, paged = model.device.type == "cuda", config.kv_cache == "paged"
        if on_gpu and not config.max_batch_tokens:
            config = replace(config, max_batch_tokens=16_384)
        if config.overlap == "auto":
            config = replace(config, overlap="on" if on_gpu and paged else "off")
        self.model, self.config, self.work, self.comm = model, config, WorkCounts(), comm
        longest = model.config.max_position_embeddings
        context = config.max_model_len or longest
        if context > longest:
            raise ValueError(f"max_model_len is {context:,}, but this model's context is {longest:,}")
        attention, kernels = (ops.choose(c, model.device, model.dtype) for c in (config.attention, config.kernels))
        self.attention, self.ops = backend(attention), ops.implementation(kernels)
        graphs = self._choose_graphs(attention, kernels)
        measurable = on_gpu and paged and not needs_lengths(attention)
        reserve = self._activation_bytes() if measurable and not config.kv_pages else 0
        self.pool = self._new_pool(config.page_size, context, reserve)
        self.pages = PageAllocator(self.pool.kv.shape[2])
        self.prefix = PREFIX_CACHES[config.prefix_cache](self.pages, config.page_size, config.eviction)
        cache = CacheManager(self.pages, config.page_size, self.prefix)
        max_len = min(context, self.pages.capacity * config.page_size + 1)  # the last token is never fed back
        self.scheduler = Scheduler(config, cache, max_len, self.work)
        self.trace = Traces(file=Trace(config.trace, self.scheduler)) if config.trace else Traces()
        self.group: Group | None = None  # the other ranks
        self.flights = deque[Flight]()  # steps in flight
        self._ahead = int(config.overlap == "on")  # how many of them may stay so
        self._failed = False  # the launch of the step before
        self.runner = self._new_runner(self.pool, max_len, self.work) if paged else None
        if self.runner and graphs != "off":
            with overlapping(config.pdl == "auto"):  # what they hold, they were captured with
                self.runner.use_graphs(backend(attention, in_graph=True), graphs == "lazy", config.graph_tokens)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.scheduler.finished or self.flights)

    def add(self, request: Request, refusal: str = "") -> None:
        """Queue a request. One that cannot be served, or was refused before, comes out of the next step, finished, with
        the reason."""
        vocab, tokens = self.model.config.vocab_size, [*request.tokens, *request.params.logit_bias]
        if not request.tokens:
            refusal = refusal or "the prompt is empty: give at least one token"
        elif not 0 <= min(tokens) <= max(tokens) < vocab:
            refusal = refusal or f"prompt or logit_bias holds token ids outside 0 … {vocab - 1}: of another tokenizer?"
        self.scheduler.add(request, refusal)

    def abort(self, request_id: int, reason: FinishReason = "abort") -> None:
        """End a request at any moment; it comes out of the next step. Unknown and finished ones are ignored."""
        self.scheduler.abort(request_id, reason)

    def step(self) -> list[Request]:
        """Plan and launch one step, and retire what need not stay in flight: with overlap, the step before.

        Returns:
            The requests that got a token or ended, each once.
        """
        grown = self._retire(0 if self._failed else self._ahead)  # what an interrupted step left in flight
        self._failed, batch = False, self.scheduler.plan()
        waits = bool(batch and batch.by_host)
        if batch:
            try:
                if waits:
                    grown += self._retire(0)
                self.flights.append(self.launch(batch))
            except BaseException:  # Ctrl-C or no memory: nothing is lost, and whoever goes on can
                self.scheduler.undo(batch)
                self._failed = True
                if self.runner:
                    self.runner.rows.forget(batch)
                raise
        grown += self._retire(self._ahead if batch and not waits else 0)
        if not self.scheduler.has_work:  # what is still in flight brings nothing that anybody wants
            self._retire(0)
        ended, self.scheduler.finished = self.scheduler.finished, []
        if self.trace:
            self.trace.write(batch, ended)
        return list(dict.fromkeys([*grown, *ended]))

    def launch(self, batch: Batch) -> Flight:
        """Start a planned step. Of its tokens those mean nothing that do not follow a request's last one."""
        assert self.runner, "the engine is closed"
        if self.config.longest_first and batch.total_tokens == len(batch.requests):
            batch.put_longest_first()
        try:
            with overlapping(self.config.pdl == "auto"):
                return self.runner.launch(batch)
        except BaseException:
            if self.group:
                self.group.close(in_step=True)  # the other ranks are somewhere in this step, and cannot take it back
            raise

    def lead(self, group: Group) -> None:
        """From now on these ranks run each step with this one, which plans; they end with this engine."""
        assert self.runner
        self.group = group
        self.runner.lead(Leader(group.send, self.runner.rows))

    def guard(self) -> AbstractContextManager[None]:
        """Around whatever may wait for other ranks: raises RankDied if one has died."""
        return self.group.guard() if self.group else nullcontext()

    def _retire(self, ahead: int) -> list[Request]:
        """Take in the tokens of the oldest steps in flight until `ahead` are left; the requests that got one."""
        grown = []
        while len(self.flights) > ahead:
            tokens = self.flights[0].tokens()  # may be interrupted: until then the step is in flight
            grown += self.scheduler.retire(self.flights.popleft().batch, tokens)
        return grown

    def stats(self) -> dict[str, float]:
        """Work done so far, requests by state, pages and bytes in use."""
        eager = self.runner.eager_steps if self.runner else {}
        return (
            asdict(self.work)
            | {f"eager_steps_{reason}": n for reason, n in eager.items()}
            | {
                "requests_running": len(self.scheduler.running),
                "requests_waiting": len(self.scheduler.waiting),
                "pages": self.pages.capacity,
                "pages_free": self.pages.num_free,
                "pages_cached": self.prefix.num_pages,
                "kv_pool_bytes": self.pool.kv.nbytes,
            }
        )

    def _choose_graphs(self, attention: str, kernels: str) -> str:
        """off, lazy or on; a ValueError where there can be none."""
        graphs, device = self.config.graphs, self.model.device.type
        if graphs == "auto":
            return "on" if device == "cuda" and attention in ("triton", "cuda") and self.comm.in_graphs else "off"
        if graphs != "off" and not self.comm.in_graphs:
            raise ValueError(
                f"graphs={graphs} cannot hold what ranks send each other through the host: use --graphs off"
            )
        if graphs != "off" and device != "cuda" and (attention, kernels) != ("torch", "torch"):
            raise ValueError(
                f"graphs={graphs} on {device} is a stand-in, which sees torch's ops only: choose --attention torch and "
                "--kernels torch, or --graphs off"
            )
        return graphs

    def _activation_bytes(self) -> int:
        """Memory that the largest steps take besides weights and pool, with and without graphs, as measured."""
        config, shape = self.config, self.model.config
        heads = (self.model.num_kv_heads, shape.head_dim)
        pool = MHAPool(shape.num_layers, 2, 16, *heads, self.model.dtype, self.model.device)
        runner = self._new_runner(pool, 16, WorkCounts())
        most = min(config.max_batch_tokens, config.max_running_requests * shape.max_position_embeddings)
        return sum(runner.rehearse(n) for n in (most, config.graph_tokens or config.max_running_requests))

    def _new_runner(self, pool: MHAPool, max_len: int, work: WorkCounts) -> StepRunner:
        rows = DeviceRows(self.config.max_running_requests, max_len, pool.page_size, self.model.device, self.ops)
        return StepRunner(self.model, pool, rows, self.attention, self.ops, work, self.comm)

    def _new_pool(self, page_size: int, context: int, reserve: int) -> MHAPool:
        """A pool of config.kv_pages, or as large as the memory allows, less the reserve, and max_running_requests can
        use."""
        config, shape, device = self.config, self.model.config, self.model.device
        heads = (self.model.num_kv_heads, shape.head_dim)
        num_pages = config.kv_pages
        if not num_pages:
            fraction = config.memory_fraction or (0.9 if device.type == "cuda" else 0.25)
            page_bytes = page_size * kv_bytes_per_token(shape.num_layers, *heads, self.model.dtype)
            most = config.max_running_requests * -(-context // page_size) + 1
            free = free_bytes(device) // (1 if self.comm.in_graphs else self.comm.size)  # without NCCL all share it
            num_pages = pages_in(int(fraction * (free - reserve)), page_bytes, most)
        num_pages = self.comm.minimum(num_pages)  # all ranks have the same pages
        return MHAPool(shape.num_layers, num_pages, page_size, *heads, self.model.dtype, device)

    def close(self) -> None:
        """Give the pool's memory back and complete the trace; requests have been aborted before."""
        self._retire(0)
        if self.group:
            self.group.close()
        self.runner = None  # its graphs read the pool
        self.pool.kv = self.pool.kv.new_empty(0)
        self.trace.close()


def free_bytes(device: torch.device) -> int:
    """Memory of a device that nobody uses now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    known = "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {})  # macOS and Windows do not say
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") if known else 4_000_000_000
