"""What pages buy and what they cost: chapter 3's pool against one contiguous region a request.

Five questions. The first two are counts, the same on every machine:
- waste: tokens of memory given out against tokens stored, by page size.
- fit: how many requests run at once in one fixed pool, and how many steps they take together; the engine itself runs.
- page_size: milliseconds of a decode step by page size.
- rows: milliseconds of a decode step by the number of requests in it.
- gather: one request's decode step over pages against chapter 2's, whose K and V are views of one region.

The run of `fit` that is drawn on the page leaves its trace in results/ch03_film.jsonl.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from math import log
from statistics import mean, median
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.record import RESULTS, load, save
from benchmarks.timing import timed
from minisgl.attention.torch_backend import TorchAttention
from minisgl.config import EngineConfig
from minisgl.core import AttentionBackend, ForwardBatch, PagedRows, Request, SamplingParams
from minisgl.engine.engine import Engine
from minisgl.kvcache.contiguous import ContiguousCache, kv_bytes_per_token
from minisgl.kvcache.mha_pool import MHAPool
from minisgl.layers.rotary import RopeConfig
from minisgl.llm import LLM
from minisgl.models.config import ModelConfig
from minisgl.models.llama import LlamaForCausalLM
from minisgl.models.register import build_model
from minisgl.models.weight import random_weights

PAGE_SIZES = [1, 4, 16, 64, 256]
FIT_CONTEXT, FIT_REGIONS, FIT_REQUESTS = 1024, 4, 48
FILM_PAGES, FILM_REQUESTS = 64, 12
ROWS, TOKENS = 8, 512  # of the step that is timed by page size


def drawn_lengths(count: int, middle: int, most: int, seed: int = 0) -> list[int]:
    """Lengths of conversations in tokens: most are short, a few are long, none exceeds the context."""
    draw = random.Random(seed)
    return [min(most, max(16, round(draw.lognormvariate(log(middle), 0.8)))) for _ in range(count)]


def pages_for(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def waste(lengths: list[int], page_sizes: list[int]) -> dict[str, Any]:
    """Memory given out to conversations of these lengths, if each holds just the pages that it needs."""
    used = sum(lengths)
    by_size = {}
    for size in page_sizes:
        entries = sum(pages_for(n, size) for n in lengths)
        by_size[str(size)] = {
            "reserved_tokens": entries * size,
            "unused_tokens_each": (entries * size - used) / len(lengths),
            "unused_share": 1 - used / (entries * size),
            "table_entries": entries,
            "table_bytes": 8 * entries,
        }
    return {"conversations": len(lengths), "used_tokens": used, "longest": max(lengths), "page_size": by_size}


def small_model() -> LlamaForCausalLM:
    """A decoder of random weights: whom the pool has room for does not depend on the model."""
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        rms_norm_eps=1e-5,
        max_position_embeddings=FIT_CONTEXT,
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        rope=RopeConfig(),
        eos_token_ids=(),
        dtype="float32",
    )
    model = build_model(config)
    random_weights(model, 0, torch.device("cpu"), torch.float32)
    return model


def requests_of(lengths: list[int]) -> list[Request]:
    """Half prompt, half answer."""
    draw = random.Random(1)
    return [
        Request(
            i,
            [draw.randrange(256) for _ in range(n - n // 2)],
            SamplingParams(max_tokens=n // 2, ignore_eos=True),
        )
        for i, n in enumerate(lengths)
    ]


def fit(model: LlamaForCausalLM, lengths: list[int], **config: Any) -> dict[str, Any]:
    """Run all requests through the engine of chapter 3 and count who runs beside whom."""
    engine = Engine(model, EngineConfig.chapter(3, max_model_len=FIT_CONTEXT, max_running_requests=256, **config))
    for request in requests_of(lengths):
        engine.add(request)
    running, held, stored = [], [], []
    while engine.scheduler.has_work:
        batch = engine.scheduler.plan()
        assert batch
        running.append(len(batch.requests))
        held.append((engine.pages.capacity - engine.pages.num_free) * engine.config.page_size)
        stored.append(sum(request.num_computed for request in batch.requests))
        engine.scheduler.retire(batch, engine.launch(batch).tokens())
    if engine.trace:
        engine.close()
    return {
        "pages": engine.pages.capacity,
        "first_group": running[0],
        "running_mean": mean(running),
        "running": running if engine.config.page_size in (16, FIT_CONTEXT) else [],  # what is drawn
        "steps": len(running),
        "preemptions": engine.work.preemptions,
        "tokens_computed": engine.work.tokens_computed,
        "used_share": sum(stored) / sum(held),  # of the memory given out, over all steps
    }


def film(model: LlamaForCausalLM) -> str:
    """A small run whose trace the page draws."""
    path = RESULTS / "ch03_film.jsonl"
    engine = Engine(
        model,
        EngineConfig.chapter(3, page_size=16, kv_pages=FILM_PAGES + 1, max_model_len=FIT_CONTEXT, trace=str(path)),
    )
    for request in requests_of(drawn_lengths(FILM_REQUESTS, 130, 300, seed=3)):
        engine.add(request)
    while engine.has_work:
        engine.step()
    engine.close()
    return path.name


class Decode:
    """One decode step of some rows over K and V that are random numbers; the pages lie anywhere in the pool."""

    def __init__(self, model: LlamaForCausalLM, rows: int, tokens: int, page_size: int) -> None:
        c, self.model = model.config, model
        width = pages_for(tokens, page_size)
        num_pages = rows * width + 1
        self.pool = MHAPool(c.num_layers, num_pages, page_size, c.num_kv_heads, c.head_dim, model.dtype, model.device)
        self.pool.kv.normal_()
        table = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(0)) + 1
        self.table = table.view(rows, width).to(model.device)
        last = self.table[:, -1] * page_size + (tokens - 1) % page_size
        starts = torch.arange(rows + 1, device=model.device)
        self.paged = PagedRows(last, self.table, [1] * rows, [tokens] * rows, starts, torch.full_like(last, tokens))
        self.ids = torch.randint(c.vocab_size, (rows,), generator=torch.Generator().manual_seed(0)).to(model.device)
        self.positions = torch.full_like(self.ids, tokens - 1)

    @torch.inference_mode()
    def __call__(self) -> None:
        self.forward(TorchAttention(self.pool, self.paged))

    def forward(self, attention: AttentionBackend) -> None:
        self.model(ForwardBatch(self.ids, self.positions, attention)).argmax(dim=-1)


class ContiguousDecode(Decode):
    """The same step of one row by the backend of chapter 2."""

    def __init__(self, model: LlamaForCausalLM, tokens: int) -> None:
        super().__init__(model, 1, tokens, tokens)
        c = model.config
        self.cache = ContiguousCache(c.num_layers, c.num_kv_heads, c.head_dim, tokens, model.dtype, model.device)
        self.cache.kv.normal_()
        self.tokens = tokens

    @torch.inference_mode()
    def __call__(self) -> None:
        self.cache.lengths = [self.tokens - 1] * len(self.cache.lengths)  # forget the last repetition
        self.forward(self.cache)


def alternate(runs: dict[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, float]:
    """Median milliseconds of each run; they take turns, so that a slow minute of the machine hits all."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(1e3 * timed(run, device))
    return {name: median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="(default: %(default)s)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 1024, 2048], help="(default: %(default)s)")
    parser.add_argument("--name", default="ch03_memory", help="of the result file (default: %(default)s)")
    args = parser.parse_args()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a second one only hinders a model this small
    small = small_model()
    lengths = drawn_lengths(FIT_REQUESTS, 150, FIT_CONTEXT)
    pool_tokens = FIT_REGIONS * FIT_CONTEXT
    sizes = [*PAGE_SIZES, FIT_CONTEXT]
    runs = {
        str(size): fit(small, lengths, page_size=size, kv_pages=pool_tokens // size + 1)
        for size in tqdm(sizes, desc="fit")
    }

    film_name = film(small)
    torch.set_num_threads(threads)
    llm = LLM(EngineConfig.chapter(3, model=args.model, device=args.device, kv_pages=2))
    model, config = llm.model, llm.model.config
    context = config.max_position_embeddings
    eight = [c["used_tokens"] for c in load("ch02_length")["data"]["conversations"]]
    many = drawn_lengths(1000, 300, context)

    decodes = {str(size): Decode(model, ROWS, TOKENS, size) for size in [*PAGE_SIZES, TOKENS]}
    by_size = alternate(decodes, args.repeats, model.device)
    del decodes
    steps = {str(rows): Decode(model, rows, TOKENS, 16) for rows in args.rows}
    by_rows = alternate(steps, args.repeats, model.device)
    del steps
    gather = []
    for tokens in tqdm(args.lengths, desc="gather"):
        pair = {"contiguous": ContiguousDecode(model, tokens), "paged": Decode(model, 1, tokens, 16)}
        ms = alternate(pair, args.repeats, model.device)
        gather.append(
            {
                "tokens": tokens,
                "contiguous_ms": ms["contiguous"],
                "paged_ms": ms["paged"],
                "ratio": ms["paged"] / ms["contiguous"],
            }
        )
    per_token = kv_bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, model.dtype)
    data = {
        "model": args.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "context": context,
        "kv_bytes_per_token": per_token,
        "waste": {name: waste(n, [*PAGE_SIZES, context]) for name, n in (("eight", eight), ("many", many))},
        "fit": {
            "context": FIT_CONTEXT,
            "pool_tokens": pool_tokens,
            "requests": len(lengths),
            "used_tokens": sum(lengths),
            "page_size": runs,
        },
        "film": film_name,
        "page_size": {
            "rows": ROWS,
            "tokens": TOKENS,
            "kv_mb": ROWS * TOKENS * per_token / 1e6,
            "runs": {
                size: {"step_ms": ms, "table_entries": ROWS * pages_for(TOKENS, int(size))}
                for size, ms in by_size.items()
            },
        },
        "rows": [
            {"rows": int(rows), "step_ms": ms, "tokens_per_s": 1e3 * int(rows) / ms} for rows, ms in by_rows.items()
        ],
        "gather": gather,
    }
    print(save(args.name, data, model.device.type))


if __name__ == "__main__":
    main()
