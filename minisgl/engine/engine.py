"""The engine: a model, a pool and a scheduler, and the loop that ties them. Ids in, ids out; it knows no text.

Nothing is global: two engines can live in one process.
"""

from __future__ import annotations

import os
from dataclasses import asdict

import torch

from minisgl.attention.torch_backend import TorchAttention
from minisgl.config import EngineConfig
from minisgl.core import Batch, ForwardBatch, Request, WorkCounts
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
        shape, size = model.config, config.page_size
        context = config.max_model_len or shape.max_position_embeddings
        if context > shape.max_position_embeddings:
            raise ValueError(
                f"max_model_len is {context:,}, but the model was made for {shape.max_position_embeddings:,}"
            )
        page_bytes = size * kv_bytes_per_token(shape.num_layers, shape.num_kv_heads, shape.head_dim, model.dtype)
        num_pages = config.kv_pages
        if not num_pages:
            most = config.max_running_requests * -(-context // size) + 1
            num_pages = pages_in(_bytes_for_pool(config.memory_fraction, model.device), page_bytes, most)
        self.pool = MHAPool(
            shape.num_layers, num_pages, size, shape.num_kv_heads, shape.head_dim, model.dtype, model.device
        )
        self.pages = PageAllocator(num_pages)
        self.prefix = PREFIX_CACHES[config.prefix_cache](self.pages, size, config.eviction)
        cache = CacheManager(self.pages, size, self.prefix)
        max_len = min(context, self.pages.capacity * size + 1)  # the last token is never fed back
        self.scheduler = Scheduler(config, cache, max_len, self.work)
        self.arrays = BatchArrays(config.max_running_requests, max_len, size, model.device)
        self.trace = Trace(config.trace, self.scheduler) if config.trace else None

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.scheduler.finished)

    def add(self, request: Request, refusal: str = "") -> None:
        """Queue a request. One that cannot be served, or was refused before, comes out of the next step, finished, with
        the reason."""
        self.scheduler.add(request, refusal or problem(request, self.model.config.vocab_size))

    def abort(self, request_id: int) -> None:
        """End a request at any moment; it comes out of the next step. Unknown and finished ones are ignored."""
        self.scheduler.abort(request_id)

    def stop(self, request_id: int) -> None:
        """End a request whose answer is complete for a reason that only its reader sees, such as a stop string."""
        self.scheduler.abort(request_id, "stop")

    def step(self) -> list[Request]:
        """Plan, run and retire one step.

        Returns:
            The requests that got a token or ended, each once.
        """
        batch = self.scheduler.plan()
        grown = self.scheduler.retire(batch, self.forward(batch)) if batch else []
        ended, self.scheduler.finished = self.scheduler.finished, []
        if self.trace:
            self.trace.write(batch, ended)
        return list(dict.fromkeys([*grown, *ended]))

    @torch.inference_mode()
    def forward(self, batch: Batch) -> list[int]:
        """Run a batch through the model: the next token of each request; -1 where the step ends before its last token,
        or where the logits hold NaN."""
        input_ids, positions, last_rows, paged = self.arrays.fill(batch)
        spans = zip(batch.requests, batch.starts, batch.num_tokens, strict=True)
        complete = [i for i, (request, start, n) in enumerate(spans) if start + n == len(request.tokens)]
        if len(complete) < len(batch.requests):
            last_rows = last_rows[complete]
        attention = TorchAttention(self.pool, paged, self.work)
        logits = self.model(ForwardBatch(input_ids, positions, attention, last_rows))
        self.work.steps += 1
        self.work.tokens_computed += len(input_ids)
        tokens = [-1] * len(batch.requests)
        if complete:
            for i, token in zip(complete, sample_rows(logits, [batch.requests[i] for i in complete]), strict=True):
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

    def close(self) -> None:
        """End all requests and complete the trace."""
        self.scheduler.abort_all()
        self.pool.kv = self.pool.kv.new_empty(0)
        if self.trace:
            self.trace.close()


def problem(request: Request, vocab_size: int) -> str:
    """Why a request cannot be served, whatever its length; empty if it can."""
    if not request.tokens:
        return "the prompt is empty: give at least one token"
    if not 0 <= min(request.tokens) <= max(request.tokens) < vocab_size:
        return f"the prompt holds token ids outside 0 … {vocab_size - 1}: was it made by another tokenizer?"
    if any(not 0 <= token < vocab_size for token in request.params.logit_bias):
        return f"logit_bias names token ids outside 0 … {vocab_size - 1}"
    return ""


def _bytes_for_pool(fraction: float, device: torch.device) -> int:
    """The share of the memory that is free now which the pool may take."""
    if device.type == "cuda":
        return int((fraction or 0.9) * torch.cuda.mem_get_info(device)[0])
    try:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # macOS and Windows do not say
        free = 4_000_000_000
    return int((fraction or 0.25) * free)
