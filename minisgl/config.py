"""Every switch of the engine, in one frozen dataclass. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from minisgl.core import require

BATCH_TOKENS = 2048  # of a step, where the config names none and the device is no GPU


@dataclass(frozen=True)
class EngineConfig:
    """What to run and how. Each optimisation is one field, whose "off" is simple code.

    Args:
        model: smollm2, a Hugging Face folder, a .gguf file, or a hub id such as Qwen/Qwen3-0.6B.
        device: auto (a CUDA GPU if there is one), cpu, cuda, cuda:1, mps.
        dtype: auto is the checkpoint's, but float32 on a CPU and float16 on a GPU without bfloat16.
        kv_cache: none recomputes everything for each token; contiguous serves one request at a time; paged many.
        page_size: tokens in a page; one as large as the context makes contiguous regions.
        kv_pages: pages in the pool, one of them a dummy; 0 takes what memory allows.
        memory_fraction: share of the free memory that the pool may take; 0 is 0.9 on a GPU and 0.25 on a CPU.
        prefix_cache: radix shares the pages of common prefixes; none computes each prompt anew.
        eviction: which cached prefix goes first: the least recently used, the least often used, or the oldest.
        batching: mixed puts decodes beside prefills; prefill_first separates them; static runs a group to its end.
        chunked_prefill: cut a prompt that exceeds the step's budget; otherwise it runs whole, alone if it must.
        max_batch_tokens: tokens that a step may compute, without static batching; 0 is 2,048, and 16,384 on a GPU.
        max_running_requests: requests that run side by side.
        max_model_len: longest sequence in tokens, answer included; 0 is the model's context.
        policy: order of waiting requests: fcfs (first come, first served) or lpm (longest cached prefix first).
        output_reserve: pages set aside when a request is admitted, as a share of its max_tokens; 1 never preempts.
        attention: over the pages: torch copies them together; cpp (on a CPU), triton, cuda and flash_attn (on a GPU)
            read them in place; auto is triton on a GPU and cpp on a CPU, where they run.
        kernels: the layers' other ops, and sampling: torch; cpp (on a CPU); triton (on a GPU), which fuses them; auto.
        decode_kernels: with Triton, products for steps of few tokens that read each weight once, and the gate in one
            with its product; auto or off.
        longest_first: order the requests of a decode step by length, so that no long one is worked on last.
        pdl: with Triton, let each kernel in while the one before still runs, from sm_90 on; auto or off.
        graphs: replay steps from CUDA graphs; on captures all sizes at the start, lazy each when it is first met; auto
            is on for attention triton or cuda. On a CPU, with torch's ops, a stand-in plays their part.
        graph_tokens: steps with prompts are graphs too, up to so many tokens; 0 launches them kernel by kernel.
        overlap: plan and launch a step while the one before runs; auto is on with a GPU.
        tp: processes that run the model together, each with its shard (tensor parallel).
        tp_backend: how they reach each other: nccl between GPUs, gloo through the host (with a GPU all are on it); auto
            is nccl where each rank has a GPU of its own, and gloo on a CPU.
        custom_all_reduce: on GPUs, sum small messages by a kernel over peer memory, in one with the addition and norm
            behind the sum. Off, as it has not been measured on several GPUs.
        trace: write one JSON event a step to this file.
        random_weights: draw weights (std 0.02) in place of loading them; only the model's config is needed.
        weight_seed: seed of the random weights.

    Raises:
        ValueError: a value out of range, or two switches that do not go together.
    """

    model: str = "smollm2"
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv_cache: Literal["none", "contiguous", "paged"] = "paged"
    page_size: int = 16
    kv_pages: int = 0
    memory_fraction: float = 0.0
    prefix_cache: Literal["none", "radix"] = "radix"
    eviction: Literal["lru", "lfu", "fifo"] = "lru"
    batching: Literal["static", "prefill_first", "mixed"] = "mixed"
    chunked_prefill: bool = True
    max_batch_tokens: int = 0
    max_running_requests: int = 256
    max_model_len: int = 0
    policy: Literal["fcfs", "lpm"] = "fcfs"
    output_reserve: float = 0.3
    attention: Literal["auto", "torch", "cpp", "triton", "cuda", "flash_attn"] = "auto"
    kernels: Literal["auto", "torch", "cpp", "triton"] = "auto"
    decode_kernels: Literal["auto", "off"] = "auto"
    longest_first: bool = True
    pdl: Literal["auto", "off"] = "auto"
    graphs: Literal["auto", "off", "lazy", "on"] = "auto"
    graph_tokens: int = 8192
    overlap: Literal["auto", "off", "on"] = "auto"
    tp: int = 1
    tp_backend: Literal["auto", "nccl", "gloo"] = "auto"
    custom_all_reduce: bool = False
    trace: str | None = None
    random_weights: bool = False
    weight_seed: int = 0

    def __post_init__(self) -> None:
        for name in ("page_size", "max_running_requests", "tp"):
            require(self, getattr(self, name) >= 1, name, "at least 1")
        for name in ("max_batch_tokens", "graph_tokens"):
            require(self, getattr(self, name) >= 0, name, "0 or more")
        require(self, self.max_model_len >= 0, "max_model_len", "0 (the model's context) or more")
        require(
            self, self.kv_pages == 0 or self.kv_pages > 1, "kv_pages", "0 (automatic) or more than 1: one is a dummy"
        )
        if self.kv_cache != "paged":
            for name in ("graphs", "overlap"):
                require(self, getattr(self, name) in ("auto", "off"), name, "off without a paged KV cache")
            require(self, self.tp == 1, "tp", "1 without a paged KV cache")
        require(self, self.tp > 1 or not self.custom_all_reduce, "custom_all_reduce", "off with one rank (--tp)")
        if self.attention == "flash_attn":
            require(self, self.page_size % 256 == 0, "page_size", "a multiple of 256 for attention=flash_attn")
        for name in ("memory_fraction", "output_reserve"):
            require(self, 0 <= getattr(self, name) <= 1, name, "between 0 and 1")

    @classmethod
    def chapter(cls, number: int, **overrides: Any) -> EngineConfig:
        """The engine as it stands at the end of a chapter.

        Raises:
            ValueError: no such chapter.
        """
        if number not in _CHAPTERS:
            raise ValueError(f"chapter {number} has no engine: choose one of {', '.join(map(str, _CHAPTERS))}")
        return replace(cls(**_CHAPTERS[number]), **overrides)


_EAGER: dict[str, Any] = {"graphs": "off", "overlap": "off", "max_batch_tokens": BATCH_TOKENS}  # until chapter 8
_EAGER |= {"decode_kernels": "off", "longest_first": False, "pdl": "off"}
_TORCH = _EAGER | {"attention": "torch", "kernels": "torch"}  # the ops of chapters 1 to 5
_STATIC = _TORCH | {"batching": "static", "max_running_requests": 16}
_CHAPTERS: dict[int, dict[str, Any]] = {
    1: _TORCH | {"kv_cache": "none"},
    2: _TORCH | {"kv_cache": "contiguous"},
    3: _STATIC | {"prefix_cache": "none"},
    4: _STATIC,
    5: _TORCH,
    6: _EAGER | {"attention": "auto", "kernels": "torch"},
    7: _EAGER,
    8: {},
    9: {},  # with --tp
    10: {},  # behind minisgl serve
}
