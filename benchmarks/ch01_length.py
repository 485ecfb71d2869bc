"""What one more token costs an engine without memory, by the length of the sequence.

- chat: one answer, and how many token rows were computed for it.
- curve: seconds, token rows and operations of one step, by length.
- machine: copy bandwidth and matrix-product rate, from which the curve can be predicted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.record import save
from benchmarks.timing import timed
from minisgl.config import EngineConfig
from minisgl.core import WorkCounts
from minisgl.llm import LLM
from minisgl.models.config import ModelConfig
from minisgl.models.llama import LlamaForCausalLM
from minisgl.simple import Recompute, step

LENGTHS = [1, 8, 32, 64, 125, 250, 500, 750, 1000]
QUESTION = "What is the capital of France?"


def parameters(config: ModelConfig) -> dict[str, int]:
    """The parameters of a decoder without biases, by the part they sit in."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    table = config.vocab_size * config.hidden_size
    parts = {
        "embedding": table if config.tie_word_embeddings else 2 * table,
        "attention": config.num_layers * config.hidden_size * (heads + config.num_heads * config.head_dim),
        "mlp": config.num_layers * 3 * config.hidden_size * config.intermediate_size,
        "norms": (2 * config.num_layers + 1) * config.hidden_size,
    }
    return parts | {"total": sum(parts.values())}


def step_flops(config: ModelConfig, length: int) -> int:
    """Multiplications and additions of one step over `length` tokens that reads the logits of the last one."""
    count = parameters(config)
    products = 2 * length * (count["attention"] + count["mlp"])
    scores = 4 * length**2 * config.num_heads * config.head_dim * config.num_layers  # q·k and weights·v, masked or not
    return products + scores + 2 * config.vocab_size * config.hidden_size


def seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of run after one warm-up."""
    run()
    return median(timed(run, device) for _ in range(repeats))


def chat(llm: LLM) -> dict[str, Any]:
    """The chapter's engine answering one question."""
    [completion] = llm.generate([[{"role": "user", "content": QUESTION}]])
    new = len(completion.token_ids)
    return {
        "question": QUESTION,
        "answer": completion.text,
        "prompt_tokens": completion.prompt_tokens,
        "new_tokens": new,
        "seconds": completion.total_s,
        "tokens_computed": llm.work.tokens_computed,
        "tokens_needed": completion.prompt_tokens + new - 1,
    }


@torch.inference_mode()
def one_step(model: LlamaForCausalLM, length: int, repeats: int) -> dict[str, Any]:
    """The step that chooses the token behind `length` tokens."""
    tokens = np.random.default_rng(0).integers(model.config.vocab_size, size=length).tolist()
    work = WorkCounts()
    taken = seconds(lambda: step(model, tokens, 0, Recompute(), work), model.device, repeats)
    return {
        "seconds": taken,
        "tokens_computed": work.tokens_computed // work.steps,
        "flops": step_flops(model.config, length),
    }


def machine(device: torch.device, dtype: torch.dtype, repeats: int) -> dict[str, float]:
    """What the device reaches at its best: a copy far larger than its caches, and a square matrix product."""
    elements, side = (2**30, 8192) if device.type == "cuda" else (2**26, 1536)
    source, target = torch.randn(elements, device=device).to(dtype), torch.empty(elements, device=device, dtype=dtype)
    a, b = torch.randn(2, side, side, device=device).to(dtype).unbind()
    return {
        "copy_bytes_per_s": 2 * source.nbytes / seconds(lambda: target.copy_(source), device, repeats),
        "matmul_flops_per_s": 2 * side**3 / seconds(lambda: a @ b, device, repeats),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--name", default="ch01_length", help="of the result file (default: %(default)s)")
    args = parser.parse_args()

    llm = LLM(EngineConfig.chapter(1, model=args.model, device=args.device))
    model = llm.model
    llm.encode("")  # loads the tokenizer, which is not the engine's time
    answer = chat(llm)
    curve = {str(n): one_step(model, n, args.repeats) for n in tqdm(LENGTHS, desc="curve")}
    limits = machine(llm.device, model.dtype, args.repeats)
    long = [length for length in LENGTHS if length >= 125]
    slope, _ = np.polyfit(long, [curve[str(length)]["seconds"] for length in long], 1)
    weight_bytes = sum(p.nbytes for p in model.parameters())
    data = {
        "model": args.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "parameters": parameters(model.config),
        "weight_bytes": weight_bytes,
        "chat": answer,
        "curve": curve,
        "seconds_per_token_of_length": slope,
        "times_slower_at_500": curve["500"]["seconds"] / curve["1"]["seconds"],
        "times_more_operations_at_500": curve["500"]["flops"] / curve["1"]["flops"],
        "machine": limits,
        "predicted": {
            "read_weights_s": weight_bytes / limits["copy_bytes_per_s"],
            "arithmetic_1_s": curve["1"]["flops"] / limits["matmul_flops_per_s"],
            "arithmetic_500_s": curve["500"]["flops"] / limits["matmul_flops_per_s"],
            "operations_per_byte_1": curve["1"]["flops"] / weight_bytes,
            "operations_per_byte_500": curve["500"]["flops"] / weight_bytes,
            "operations_per_byte_machine": limits["matmul_flops_per_s"] / limits["copy_bytes_per_s"],
        },
    }
    print(save(args.name, data, llm.device.type))


if __name__ == "__main__":
    main()
