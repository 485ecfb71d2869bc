"""The small dataclasses that travel through the engine.

Imports no torch: whatever plans work in plain integers can use this file in milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "abort", "error"]


def require(owner: object, holds: bool, name: str, expected: str) -> None:
    """Raise a ValueError that names a field of the owner, its value, and what was expected."""
    if not holds:
        raise ValueError(f"{name} is {getattr(owner, name)}, but must be {expected}")


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the next token and when to stop. Frozen, so that one object can serve many requests.

    Args:
        max_tokens: at most this many new tokens, ≥ 1.
        min_tokens: no end of sequence and no stop token before this many new tokens.
        temperature: 0 is greedy; 1 samples from the model's own distribution; ≥ 0.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the fewest tokens whose probabilities sum to at least this, in (0, 1] (Holtzman et al., 2020).
        min_p: drop tokens less probable than this fraction of the most probable one, in [0, 1].
        repetition_penalty: divide the logits of tokens seen in prompt or answer by this (CTRL, Keskar et al., 2019).
        presence_penalty: subtract this from the logits of tokens in the answer, -2 … 2.
        frequency_penalty: subtract this for each time a token stands in the answer, -2 … 2.
        logit_bias: added to the logits of these token ids, as in 12=-5.
        seed: same seed, same tokens, whatever else runs beside; None draws a fresh one.
        stop: strings that end the answer and are not part of it.
        stop_token_ids: token ids that end the answer, besides the model's own.
        ignore_eos: go on past end-of-sequence tokens, for benchmarks.
        n: answers to one prompt; with a seed, answer i takes seed + i.
        logprobs: report each token's log-probability and those of this many most probable tokens; None reports none.
        priority: higher is scheduled first and preempted last.
        cache_salt: prefixes are shared only between requests of the same salt.
        detokenize: False leaves the text empty, and needs no tokenizer for prompts of token ids.

    Raises:
        ValueError: a value out of range, naming the field.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    priority: int = 0
    cache_salt: str = ""
    detokenize: bool = True

    def __post_init__(self) -> None:
        # One string is not a sequence of its letters. Tuples: equal to each other, and nobody's to change.
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        require(self, self.max_tokens >= 1, "max_tokens", "at least 1")
        require(self, 0 <= self.min_tokens <= self.max_tokens, "min_tokens", "between 0 and max_tokens")
        require(self, 0 <= self.temperature < float("inf"), "temperature", "0 or more, and finite")
        require(self, self.top_k >= 0, "top_k", "0 (off) or more")
        require(self, 0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        require(self, 0 <= self.min_p <= 1, "min_p", "between 0 and 1")
        require(self, 0 < self.repetition_penalty < float("inf"), "repetition_penalty", "above 0, and finite")
        require(self, -2 <= self.presence_penalty <= 2, "presence_penalty", "between -2 and 2")
        require(self, -2 <= self.frequency_penalty <= 2, "frequency_penalty", "between -2 and 2")
        require(self, all(-100 <= b <= 100 for b in self.logit_bias.values()), "logit_bias", "between -100 and 100")
        require(self, self.seed is None or 0 <= self.seed < 2**63, "seed", "between 0 and 2**63 - 1")
        require(self, self.detokenize or not self.stop, "stop", "empty without detokenize")
        require(self, "" not in self.stop, "stop", "strings of at least one character")
        require(self, self.n >= 1, "n", "at least 1")
        require(self, self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs", "between 0 and 20")


@dataclass(eq=False, slots=True)
class Request:
    """One sequence on its way: prompt and answer in one list, of which the first num_computed went through the model.

    Prefill, chunk, decode, prefix hit and resumption after preemption are the same case: a step computes some of the
    tokens that are not computed yet (the rule of vLLM's V1 scheduler).
    """

    id: int
    tokens: list[int]  # prompt, then answer
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()  # tokens that end the answer
    prompt_len: int = 0
    max_len: int = 0  # tokens, prompt included, at which the answer ends for "length"
    seed: int = 0
    # what the scheduler and the cache manager keep about it
    num_computed: int = 0  # tokens that went through the model or will in a step already planned
    num_cached: int = 0  # prompt tokens that another request had computed
    pages: list[int] = field(default_factory=list)  # the page table: page i holds tokens i · page_size …
    node: Any = None  # the deepest node of the prefix tree that it locks
    row: int = -1  # its place in the engine's persistent arrays while it runs
    in_flight: int = 0  # planned steps that are not retired
    preemptions: int = 0
    # what came out
    finish_reason: FinishReason | None = None
    error: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    # what its parameters ask for
    filtered: bool = False  # top-k, top-p or min-p
    by_host: str = ""  # why its next token cannot be chosen before the host has seen the one before

    def __post_init__(self) -> None:
        params = self.params
        self.prompt_len = len(self.tokens)
        self.max_len = self.prompt_len + params.max_tokens
        self.filtered = bool(params.top_k or params.top_p < 1 or params.min_p)
        by_host = {
            "penalties": params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty,
            "logit_bias": params.logit_bias,
            "min_tokens": params.min_tokens and self.stop_ids,
            "logprobs": params.logprobs is not None,
        }
        self.by_host = next((reason for reason, holds in by_host.items() if holds), "")

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own probabilities, before temperature, penalties and filters."""

    token_id: int
    logprob: float
    top: dict[int, float]  # most probable first


@dataclass(eq=False, slots=True)
class Batch:
    """One step as it was planned, in plain ints: request i computes num_tokens[i] tokens from position starts[i]."""

    requests: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    moved: list[tuple[Request, int]] = field(default_factory=list)  # page tables that changed, from which page on
    held: list[int] = field(default_factory=list)  # pages that only this step still reads

    def __iter__(self) -> Iterator[tuple[Request, int, int]]:
        """Each request with the position and the number of its tokens."""
        return zip(self.requests, self.starts, self.num_tokens, strict=True)

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens)

    def put_longest_first(self) -> None:
        """Reorder the requests: a GPU works on a few at a time, and should not end with a long one alone."""
        order = sorted(range(len(self.requests)), key=self.starts.__getitem__, reverse=True)
        self.requests = [self.requests[i] for i in order]
        self.starts = [self.starts[i] for i in order]
        self.num_tokens = [self.num_tokens[i] for i in order]

    @property
    def by_host(self) -> str:
        """Why a token of this step cannot be chosen before the host has seen all before it; empty if it can."""
        return next((request.by_host for request in self.requests if request.by_host), "")


@dataclass
class WorkCounts:
    """What the engine did, counted rather than timed: the same on every machine."""

    steps: int = 0
    graph_steps: int = 0  # of these, replayed from a graph
    tokens_computed: int = 0  # token rows that went through the decoder
    tokens_reused: int = 0  # prompt tokens whose K and V another request had computed
    preemptions: int = 0
    kv_bytes_read: int = 0  # from the KV cache, all layers
    kv_bytes_written: int = 0


class AttentionBackend(Protocol):
    """Where a layer's K and V come from, and how queries attend over them."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, batch: ForwardBatch
    ) -> torch.Tensor:
        """Attend with this step's q [T, heads, head_dim], k and v [T, kv_heads, head_dim]; returns q's shape."""
        ...


class InPlaceBackend(AttentionBackend, Protocol):
    """A backend that reads K and V where they lie, so that storing them may come before and apart."""

    def destination(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where the step's K and V go: keys and values [slots, kv_heads, head_dim], and their slots [T] int64."""
        ...

    def attend(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        """Attention of q [T, heads, head_dim] over all K and V, this step's included; returns q's shape."""
        ...


@dataclass
class ForwardBatch:
    """One step as the layers see it: T tokens in a row, and what they attend to."""

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, the place of each token in its sequence
    attention: AttentionBackend
    output_rows: torch.Tensor | None = None  # [R] rows whose logits are wanted; None for all


@dataclass
class PagedRows:
    """Where a step's tokens lie in the pool: B sequences, of which the last query_lens[i] tokens are computed now."""

    slots: torch.Tensor  # [T] int64, where this step's K and V go
    page_table: torch.Tensor  # [B, P] int64; beyond a sequence's pages its row means nothing
    query_lens: list[int]  # tokens of this step, T in sum
    kv_lens: list[int]  # all tokens of each sequence, those of this step included
    query_starts: torch.Tensor  # [B + 1] int64, where each sequence's tokens start among the T, and T
    device_kv_lens: torch.Tensor  # [B] int64, kv_lens where the kernels read them
