"""What the KV cache buys and what it costs, on the course's default model: chapter 1's engine beside chapter 2's.

Four questions, all with the same weights in one process, the engines taking turns:
- curve: how long one more token takes when the sequence has n tokens.
- answer: how long one whole answer takes, and how many token rows it computes.
- latency: time to the first token against time between tokens, by prompt length.
- conversations: bytes reserved against bytes used when each conversation may fill the context.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.record import save
from benchmarks.timing import timed
from minisgl.config import EngineConfig
from minisgl.core import SamplingParams, WorkCounts
from minisgl.kvcache.contiguous import kv_bytes_per_token
from minisgl.llm import LLM
from minisgl.models.llama import LlamaForCausalLM
from minisgl.simple import Recompute, cached_generate, naive_generate, new_cache, output_limit, step

LENGTHS = [32, 64, 128, 256, 512, 1024]
PROMPT_LENGTHS = [64, 128, 256, 512, 1024]
ANSWER_TOKENS = 192  # where a conversation's answer is cut, if the model has not ended it
QUESTIONS = [
    "What is the capital of France?",
    "Explain in three sentences why the sky is blue.",
    "Write a short poem about the sea.",
    "Give me a simple recipe for pancakes.",
    "What is the difference between a list and a tuple in Python?",
    "Tell me a short story about a lighthouse keeper.",
    "How do I learn to play the guitar?",
    "Who wrote Hamlet, and what is it about?",
]
PASSAGE = """A lighthouse keeper writes down what she sees. Ships come in the morning with wool and salt, and leave at
night with tin. When fog covers the bay she rings the bell once a minute, counting seconds aloud so that she does not
fall asleep. Her brother repairs the lamp. He says that light is patient: it goes straight until something stops it. """


def alternate(runs: dict[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, float]:
    """Median milliseconds of each run; they take turns, so that a slow minute of the machine hits both."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(1e3 * timed(run, device))
    return {name: median(values) for name, values in times.items()}


@torch.inference_mode()
def next_token(model: LlamaForCausalLM, tokens: list[int], repeats: int) -> dict[str, Any]:
    """One more token behind tokens[:-1], by both engines."""
    length, layers = len(tokens), model.config.num_layers
    naive_work, cached_work = WorkCounts(), WorkCounts()
    cache = new_cache(model, length)
    step(model, tokens[:-1], 0, cache, WorkCounts())
    cache.work = cached_work

    def naive() -> None:
        step(model, tokens, 0, Recompute(), naive_work)

    def cached() -> None:
        cache.lengths = [length - 1] * layers  # forget the token of the last repetition
        step(model, tokens[-1:], length - 1, cache, cached_work)

    ms = alternate({"naive": naive, "cached": cached}, repeats, model.device)
    return {
        "length": length,
        "naive_ms": ms["naive"],
        "cached_ms": ms["cached"],
        "speedup": ms["naive"] / ms["cached"],
        "naive_tokens": naive_work.tokens_computed // naive_work.steps,
        "cached_tokens": cached_work.tokens_computed // cached_work.steps,
        "kv_bytes_read": cached_work.kv_bytes_read // cached_work.steps,
    }


def whole_answer(model: LlamaForCausalLM, prompt: list[int], new_tokens: int, repeats: int) -> dict[str, Any]:
    """One answer of new_tokens tokens by both engines, and whether they agree."""
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    answers: dict[str, list[int]] = {}
    work: dict[str, WorkCounts] = {}

    def run(name: str, generate: Callable[..., Any]) -> None:
        work[name] = WorkCounts()
        answers[name] = list(generate(model, prompt, params, work[name]))

    runs = {
        "naive": lambda: run("naive", naive_generate),
        "cached": lambda: run("cached", cached_generate),
    }
    ms = alternate(runs, repeats, model.device)
    return {
        "prompt_tokens": len(prompt),
        "new_tokens": new_tokens,
        "same_tokens": answers["naive"] == answers["cached"],
        "naive_s": ms["naive"] / 1e3,
        "cached_s": ms["cached"] / 1e3,
        "speedup": ms["naive"] / ms["cached"],
        "naive_tokens_computed": work["naive"].tokens_computed,
        "cached_tokens_computed": work["cached"].tokens_computed,
        "kv_bytes_written": work["cached"].kv_bytes_written,
        "kv_bytes_read": work["cached"].kv_bytes_read,
    }


def latency(model: LlamaForCausalLM, prompt: list[int], repeats: int) -> dict[str, Any]:
    """Time to the first token, and the median time between the ones after it."""
    first, between = [], []
    for _ in range(repeats):
        stream = cached_generate(model, prompt, SamplingParams(max_tokens=17, ignore_eos=True))
        first.append(1e3 * timed(stream.__next__, model.device))
        between += [1e3 * timed(stream.__next__, model.device) for _ in range(16)]
    return {
        "prompt_tokens": len(prompt),
        "first_token_ms": median(first),
        "between_tokens_ms": median(between),
        "ratio": median(first) / median(between),
        "prefill_tokens_per_s": 1e3 * len(prompt) / median(first),
    }


def conversation(llm: LLM, question: str) -> dict[str, Any]:
    """Bytes that one conversation used, of a region for all the tokens that might have come."""
    model, config = llm.model, llm.model.config
    prompt = llm.encode([{"role": "user", "content": question}])
    work = WorkCounts()
    answer = list(cached_generate(model, prompt, SamplingParams(max_tokens=ANSWER_TOKENS), work))
    open_ended = output_limit(model, prompt, SamplingParams(max_tokens=config.max_position_embeddings))
    reserved = len(prompt) + open_ended - 1  # tokens, as cached_generate would reserve them
    per_token = kv_bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, model.dtype)
    return {
        "question": question,
        "used_tokens": len(prompt) + len(answer) - 1,
        "reserved_tokens": reserved,
        "used_bytes": work.kv_bytes_written,
        "reserved_bytes": per_token * reserved,
    }


def total(conversations: list[dict[str, Any]]) -> dict[str, Any]:
    """The conversations together."""
    used, reserved = (sum(c[key] for c in conversations) for key in ("used_bytes", "reserved_bytes"))
    return {
        "conversations": len(conversations),
        "answer_limit_tokens": ANSWER_TOKENS,
        "used_tokens": sum(c["used_tokens"] for c in conversations),
        "reserved_tokens": sum(c["reserved_tokens"] for c in conversations),
        "used_bytes": used,
        "reserved_bytes": reserved,
        "used_share": used / reserved,
        "would_fit_if_used_only": int(reserved / (used / len(conversations))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="of the curve (default: %(default)s)")
    parser.add_argument("--name", default="ch02_length", help="of the result file (default: %(default)s)")
    args = parser.parse_args()

    llm = LLM(EngineConfig.chapter(2, model=args.model, device=args.device))
    model, config = llm.model, llm.model.config
    text = llm.encode(PASSAGE * 120)
    conversations = [conversation(llm, question) for question in tqdm(QUESTIONS, desc="conversations")]
    data = {
        "model": args.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "context": config.max_position_embeddings,
        "weight_bytes": sum(p.nbytes for p in model.parameters()),
        "kv_bytes_per_token": kv_bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, model.dtype),
        "curve": [next_token(model, text[:n], args.repeats) for n in tqdm(args.lengths, desc="curve")],
        "answer": whole_answer(model, text[:64], 128, min(args.repeats, 3)),
        "latency": [latency(model, text[:n], args.repeats) for n in tqdm(PROMPT_LENGTHS, desc="latency")],
        "conversations": conversations,
        "total": total(conversations),
    }
    print(save(args.name, data, llm.device.type))


if __name__ == "__main__":
    main()
