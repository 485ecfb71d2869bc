"""The loops of chapters 1 and 2 behind the engine's interface: one request after another, each by its own loop."""

from collections.abc import Iterator
from dataclasses import replace

from minisgl.config import EngineConfig
from minisgl.core import Batch, Request, SamplingParams
from minisgl.engine.engine import Engine
from minisgl.engine.runner import Flight
from minisgl.kvcache.mha_pool import MHAPool
from minisgl.models.llama import LlamaForCausalLM
from minisgl.simple import cached_generate, naive_generate

LOOPS = {"none": naive_generate, "contiguous": cached_generate}
# What these loops know. Everything else came with the batch engine.
KNOWN = {"max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "ignore_eos", "n", "detokenize"}


class SerialEngine(Engine):
    """The scheduler's queue with room for one request, whose tokens come from a loop with its own memory."""

    def __init__(self, model: LlamaForCausalLM, config: EngineConfig) -> None:
        self._loop, self._current = LOOPS[config.kv_cache], -1
        self._tokens: Iterator[int] = iter(())
        config = replace(config, batching="static", max_running_requests=1, prefix_cache="none", chunked_prefill=False)
        super().__init__(model, replace(config, page_size=model.config.max_position_embeddings))

    def add(self, request: Request, refusal: str = "") -> None:
        """See engine.Engine.add."""
        default = SamplingParams()
        asked = {name for name in vars(default) if getattr(request.params, name) != getattr(default, name)}
        if unknown := sorted(asked - KNOWN):
            refusal = refusal or f"the engine of chapters 1 and 2 has no {unknown[0]}: choose kv_cache paged"
        super().add(request, refusal)

    def launch(self, batch: Batch) -> Flight:
        """The loop's next token, which is there when this returns; -1 where the logits hold NaN."""
        [request] = batch.requests
        if request.id != self._current:
            params = replace(request.params, seed=request.seed)
            self._tokens, self._current = self._loop(self.model, list(request.tokens), params, self.work), request.id
        try:
            tokens = [next(self._tokens)]
        except FloatingPointError:
            tokens = [-1]
        return Flight(batch, lambda: tokens)

    def _new_pool(self, page_size: int, context: int, reserve: int) -> MHAPool:
        """One page that no memory stands behind: the loop keeps K and V itself, or nothing."""
        return MHAPool(0, 2, page_size, 0, 0, self.model.dtype, self.model.device)
