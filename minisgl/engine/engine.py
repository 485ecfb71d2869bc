"""The engine: a model, a pool and a scheduler, and the loop that ties them. Ids in, ids out; it knows no text.

Nothing is global: two engines can live in one process.
"""

import os
from dataclasses import asdict

import minisgl_kernels as ops
import torch

from minisgl.attention import backend
from minisgl.config import EngineConfig
from minisgl.core import Batch, FinishReason, ForwardBatch, Request, WorkCounts
from minisgl.engine.arrays import BatchArrays
from minisgl.engine.sampler import sample_rows
from minisgl.engine.trace import Trace
from minisgl.kvcache.cache_manager import CacheManager
from minisgl.kvcache.contiguous import kv_bytes_per_token
from minisgl.kvcache.mha_pool import MHAPool, pages_in
from minisgl.kvcache.pages import PageAllocator
from minisgl.kvcache.radix_cache import PREFIX_CACHES
from minisgl.models.llama import LlamaForCausalLM
from minisgl.scheduler.scheduler import Scheduler


class Engine:
    """Runs many requests over one paged pool.

    Raises:
        ValueError: max_model_len exceeds the model's context, or the pool has no room.
    """

    def __init__(self, model: LlamaForCausalLM, config: EngineConfig) -> None:
        self.model, self.config, self.work = model, config, WorkCounts()
        longest = model.config.max_position_embeddings
        context = config.max_model_len or longest
        if context > longest:
            raise ValueError(f"max_model_len is {context:,}, but this model's context is {longest:,}")
        self.pool = self._new_pool(config.page_size, context)
        self.pages = PageAllocator(self.pool.kv.shape[2])
        self.prefix = PREFIX_CACHES[config.prefix_cache](self.pages, config.page_size, config.eviction)
        cache = CacheManager(self.pages, config.page_size, self.prefix)
        max_len = min(context, self.pages.capacity * config.page_size + 1)  # the last token is never fed back
        self.scheduler = Scheduler(config, cache, max_len, self.work)
        self.attention = backend(ops.choose(config.attention, model.device, model.dtype))
        self.ops = ops.implementation(ops.choose(config.kernels, model.device, model.dtype))
        self.arrays = BatchArrays(config.max_running_requests, max_len, config.page_size, model.device)
        self.trace = Trace(config.trace, self.scheduler) if config.trace else None

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.scheduler.finished)

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
        """Plan, run and retire one step.

        Returns:
            The requests that got a token or ended, each once.
        """
        grown = []
        if batch := self.scheduler.plan():
            try:
                tokens = self.forward(batch)
            except BaseException:  # Ctrl-C or no memory: nothing is lost, and whoever goes on can
                self.scheduler.undo(batch)
                raise
            grown = self.scheduler.retire(batch, tokens)
        ended, self.scheduler.finished = self.scheduler.finished, []
        if self.trace:
            self.trace.write(batch, ended)
        return list(dict.fromkeys([*grown, *ended]))

    @torch.inference_mode()
    def forward(self, batch: Batch) -> list[int]:
        """Run a batch through the model: the next token of each request; -1 where the step ends before its last token,
        or where the logits hold NaN."""
        input_ids, positions, last_rows, paged = self.arrays.fill(batch)
        complete = [i for i, (request, start, n) in enumerate(batch) if start + n == len(request.tokens)]
        if len(complete) < len(batch.requests):
            last_rows = last_rows[complete]
        attention = self.attention(self.pool, paged, self.work)
        logits = self.model(ForwardBatch(input_ids, positions, attention, last_rows))
        self.work.steps += 1
        self.work.tokens_computed += len(input_ids)
        tokens = [-1] * len(batch.requests)
        if complete:
            for i, token in zip(
                complete, sample_rows(logits, [batch.requests[i] for i in complete], self.ops), strict=True
            ):
                tokens[i] = token
        return tokens

    def stats(self) -> dict[str, float]:
        """Work done so far, requests by state, pages and bytes in use."""
        return asdict(self.work) | {
            "requests_running": len(self.scheduler.running),
            "requests_waiting": len(self.scheduler.waiting),
            "pages": self.pages.capacity,
            "pages_free": self.pages.num_free,
            "pages_cached": self.prefix.num_pages,
            "kv_pool_bytes": self.pool.kv.nbytes,
        }

    def _new_pool(self, page_size: int, context: int) -> MHAPool:
        """A pool of config.kv_pages, or as large as the memory allows and max_running_requests can use."""
        config, shape, device = self.config, self.model.config, self.model.device
        heads = (shape.num_kv_heads, shape.head_dim)
        num_pages = config.kv_pages
        if not num_pages:
            fraction = config.memory_fraction or (0.9 if device.type == "cuda" else 0.25)
            page_bytes = page_size * kv_bytes_per_token(shape.num_layers, *heads, self.model.dtype)
            most = config.max_running_requests * -(-context // page_size) + 1
            num_pages = pages_in(int(fraction * free_bytes(device)), page_bytes, most)
        return MHAPool(shape.num_layers, num_pages, page_size, *heads, self.model.dtype, device)

    def close(self) -> None:
        """Give the pool's memory back and complete the trace; requests have been aborted before."""
        self.pool.kv = self.pool.kv.new_empty(0)
        if self.trace:
            self.trace.close()
        self.trace = None


def free_bytes(device: torch.device) -> int:
    """Memory of a device that nobody uses now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    known = "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {})  # macOS and Windows do not say
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") if known else 4_000_000_000
