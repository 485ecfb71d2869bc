"""The engines of chapters 1 and 2 behind the interface of `engine.Engine`: one request after another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

from minisgl.config import EngineConfig
from minisgl.core import FinishReason, Request, SamplingParams, WorkCounts
from minisgl.models.llama import LlamaForCausalLM
from minisgl.simple import cached_generate, naive_generate

# What these loops know. Everything else came with the batch engine.
KNOWN = {"max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "ignore_eos", "n", "detokenize"}


class SerialEngine:
    """Runs the first request to its end, one token a step, then the next. Queue order is the order of arrival."""

    def __init__(self, model: LlamaForCausalLM, config: EngineConfig) -> None:
        self.model, self.config, self.work = model, config, WorkCounts()
        self._generate = {"none": naive_generate, "contiguous": cached_generate}[config.kv_cache]
        self._requests: list[Request] = []
        self._ended: list[Request] = []
        self._tokens: Iterator[int] | None = None  # of the first request

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._ended)

    def add(self, request: Request, refusal: str = "") -> None:
        """See engine.Engine.add."""
        self._requests.append(request)
        default = SamplingParams()
        asked = {name for name in vars(default) if getattr(request.params, name) != getattr(default, name)}
        if unknown := sorted(asked - KNOWN):
            refusal = refusal or f"the engine of chapters 1 and 2 has no {unknown[0]}: choose kv_cache paged"
        if refusal:
            request.error = refusal
            self._end(request.id, "error")

    def abort(self, request_id: int) -> None:
        """See engine.Engine.abort."""
        self._end(request_id, "abort")

    def stop(self, request_id: int) -> None:
        """See engine.Engine.stop."""
        self._end(request_id, "stop")

    def step(self) -> list[Request]:
        """One token of the first request; returns it, and those that ended since the last step."""
        served = self._requests[:1]
        for request in served:
            try:
                if self._tokens is None:
                    params = replace(request.params, seed=request.seed)
                    self._tokens = self._generate(self.model, list(request.tokens), params, self.work)
                token = next(self._tokens)
            except (ValueError, FloatingPointError) as error:
                request.error = str(error)
                self._end(request.id, "error")
                continue
            request.tokens.append(token)
            if token in request.stop_ids:
                self._end(request.id, "stop")
            elif len(request.tokens) >= min(request.max_len, self.model.config.max_position_embeddings):
                self._end(request.id, "length")
        ended, self._ended = self._ended, []
        return list(dict.fromkeys([*served, *ended]))

    def stats(self) -> dict[str, float]:
        """Work done so far."""
        return asdict(self.work)

    def close(self) -> None:
        """End all requests."""
        for request in list(self._requests):
            self.abort(request.id)

    def _end(self, request_id: int, reason: FinishReason) -> None:
        for request in self._requests:
            if request.id == request_id:
                if request is self._requests[0]:
                    self._tokens = None
                self._requests.remove(request)
                self._ended.append(request)
                request.finish_reason = reason
                return
