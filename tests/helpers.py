"""What many tests build: tiny random decoders and their twins in transformers, schedulers, and checks of the pool."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from minisgl_kernels import reference

from minisgl.config import EngineConfig
from minisgl.core import Batch, Request, SamplingParams, WorkCounts
from minisgl.engine.engine import Engine
from minisgl.engine.rows import DeviceRows
from minisgl.engine.runner import StepRunner
from minisgl.kvcache.cache_manager import CacheManager
from minisgl.kvcache.mha_pool import MHAPool
from minisgl.kvcache.pages import PageAllocator
from minisgl.kvcache.radix_cache import PREFIX_CACHES, Node
from minisgl.layers.linear import MergedLinear
from minisgl.layers.rotary import RopeConfig
from minisgl.models.config import ROPE_FIELDS, ModelConfig
from minisgl.models.llama import LlamaForCausalLM
from minisgl.models.register import build_model
from minisgl.models.weight import random_weights
from minisgl.scheduler.policy import precedence
from minisgl.scheduler.scheduler import Scheduler

# Each rope type, at sizes where a tiny model's few pairs fall on both sides of the thresholds.
ROPES = {
    "default": RopeConfig(rope_theta=5000.0),
    "linear": RopeConfig("linear", factor=2.5),
    "llama3": RopeConfig("llama3", factor=8.0, original_max_position_embeddings=64),
    "yarn": RopeConfig("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=8.0),
    "yarn-untruncated": RopeConfig("yarn", factor=4.0, original_max_position_embeddings=64, truncate=False),
    "yarn-mscale": RopeConfig(
        "yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.707, mscale_all_dim=1.0
    ),
    "yarn-attention-factor": RopeConfig(
        "yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=1.3, mscale=0.707, mscale_all_dim=1.0
    ),
}

if TYPE_CHECKING:
    import transformers


def tiny_config(**overrides: Any) -> ModelConfig:
    """Awkward on purpose: grouped heads, hidden ≠ heads × head_dim, no power of two where none is needed."""
    base = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=131,
        hidden_size=36,
        intermediate_size=52,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=10,
        rms_norm_eps=1e-5,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        rope=RopeConfig(),
        eos_token_ids=(2, 7),
        dtype="float32",
    )
    return replace(base, **overrides)


def tiny_model(architecture: str = "LlamaForCausalLM", seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """A decoder with weights large enough that attention and logits are far from uniform, in fp32 on the CPU."""
    model = build_model(tiny_config(architecture=architecture, **overrides))
    random_weights(model, seed, torch.device("cpu"), torch.float32, std=0.3)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):  # all ones would hide a norm whose weight is not applied
            parameter.uniform_(0.5, 1.5, generator=generator)
    return model


def hf_state(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """The model's weights as a Hugging Face checkpoint names them."""
    state: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            if isinstance(module, MergedLinear):
                parent = path.rpartition(".")[0]
                rows = parameter.split([shard.size for shard in module.parts.values()])
                state |= {f"{parent}.{part}.{kind}": row.clone() for part, row in zip(module.parts, rows, strict=True)}
            else:
                state[f"{path}.{kind}"] = parameter.detach().clone()
    return state


def hf_json(config: ModelConfig) -> dict[str, Any]:
    """The config in Hugging Face's JSON form: what `ModelConfig.from_hf` reads."""
    needed, optional = ROPE_FIELDS[config.rope.rope_type]
    rope = {k: v for k, v in asdict(config.rope).items() if k in needed | optional | {"rope_type", "rope_theta"}}
    fields = {
        "architectures": [config.architecture],
        "model_type": "qwen3" if config.architecture == "Qwen3ForCausalLM" else "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "rope_parameters": {k: v for k, v in rope.items() if v is not None},
        "eos_token_id": list(config.eos_token_ids),
        "dtype": config.dtype,
    }
    if config.architecture == "Qwen3ForCausalLM":
        del fields["mlp_bias"]
    return fields


def hf_twin(model: LlamaForCausalLM) -> transformers.PreTrainedModel:
    """transformers' own model with the same config and weights."""
    import transformers  # here, since it takes seconds and most tests need no twin

    config = transformers.AutoConfig.for_model(**hf_json(model.config))
    twin = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    missing, unexpected = twin.load_state_dict(hf_state(model), strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    return twin.eval()


# The engine, and its host side without a model.


def scheduler_with(pages: int, **config: Any) -> Scheduler:
    """A scheduler over an empty pool of this many usable pages, as the engine builds it."""
    switches = EngineConfig(**config)
    allocator = PageAllocator(pages + 1)  # and the dummy
    prefix = PREFIX_CACHES[switches.prefix_cache](allocator, switches.page_size, switches.eviction)
    cache = CacheManager(allocator, switches.page_size, prefix)
    context = switches.max_model_len or 10**6
    return Scheduler(switches, cache, min(context, pages * switches.page_size + 1))


def request(id: int, tokens: Sequence[int], stop_ids: Iterable[int] = (), **params: Any) -> Request:
    """A request as the engine is given one."""
    return Request(id, list(tokens), SamplingParams(**params), frozenset(stop_ids))


@torch.inference_mode()
def sample_rows(logits: torch.Tensor, requests: Sequence[Request], ops: Any = reference) -> list[int]:
    """The tokens that a step chooses whose model answers with logits [B, vocab], one row a request.

    Logprobs are appended where they are asked for; all else of the requests stays as it is.
    """
    placed = [copy(r) for r in requests]
    for row, r in enumerate(placed):
        r.row = row
    last, longest = [len(r.tokens) - 1 for r in placed], max(len(r.tokens) for r in placed)
    batch = Batch(placed, last, [1] * len(placed), [(r, 0) for r in placed])
    pool = MHAPool(1, 1, longest, 1, 1, logits.dtype, logits.device)
    rows = DeviceRows(len(placed), longest, longest, logits.device)
    runner = StepRunner(lambda _: logits, pool, rows, lambda *_: None, ops, WorkCounts())
    filtered = any(r.filtered for r in placed)
    return runner._eager(batch, filtered, bool(batch.by_host)).tolist()


def fake_token(tokens: Sequence[int]) -> int:
    """What a fake model says next: depends on the last tokens and on the position, so that a lost one shows."""
    return (sum(tokens[-3:]) * 31 + len(tokens) * 7) % 50


def fake_forward(batch: Batch) -> list[int]:
    """The fake model's token for each request of a batch; 3, which would mean something, where none is due."""
    rows = zip(batch.requests, batch.starts, batch.num_tokens, strict=True)
    return [fake_token(r.tokens) if start + n == len(r.tokens) else 3 for r, start, n in rows]


def run_to_the_end(scheduler: Scheduler) -> list[Batch]:
    """Plan, run the fake model and retire until nobody is left; returns the steps."""
    steps = []
    while scheduler.has_work:
        batch = scheduler.plan()
        assert batch is not None, "somebody waits, and nothing is planned"
        scheduler.retire(batch, fake_forward(batch))
        steps.append(batch)
    return steps


def serve(engine: Engine, *requests: Request) -> tuple[Request, ...]:
    """Run requests through an engine to their end."""
    for r in requests:
        engine.add(r)
    while engine.has_work:
        engine.step()
    return requests


def check_pool(scheduler: Scheduler, requests: Iterable[Request]) -> None:
    """Every page is in one state and every count is right. `requests`: all that may still hold something."""
    cache, config = scheduler.cache, scheduler.config
    pages, tree = cache.pages, cache.prefix
    holding = [r for r in requests if r.row >= 0]
    for r in scheduler.waiting:
        assert (r.pages, r.row, r.node, r.finish_reason) == ([], -1, None, None), "a waiting request holds nothing"

    nodes, stack = list[Node](), [tree.root]
    while stack:
        node = stack.pop()
        for (salt, first), child in node.children.items():
            assert child.parent is node
            assert (child.salt, child.tokens[: cache.page_size]) == (salt, first)
            assert len(child.tokens) == len(child.pages) * cache.page_size > 0
            nodes.append(child)
            stack.append(child)

    holders, locks = Counter[int](), Counter[Node]()
    for batch in scheduler.in_flight:
        holders.update(batch.held)
    for r in holding:
        assert len(set(r.pages)) == len(r.pages), "a page table names a page twice"
        assert len(r.pages) == cache.pages_for(r.num_computed), "as many pages as the computed tokens need"
        holders.update(r.pages)
        node = r.node
        while node.parent is not None:
            locks[node] += 1
            node = node.parent
    for node in nodes:
        assert node.locks == locks[node]
        holders.update(node.pages)
        if node.locks == 0:
            assert {holders[page] for page in node.pages} == {1}, "evicting these pages would free none"
    assert [pages.holders(page) for page in range(1, pages.capacity + 1)] == [
        holders[page] for page in range(1, pages.capacity + 1)
    ]
    assert sorted(pages._free) == [page for page in range(1, pages.capacity + 1) if not holders[page]]
    assert tree.num_pages == sum(len(node.pages) for node in nodes)
    assert tree.num_evictable == sum(len(node.pages) for node in nodes if not node.locks)

    queued = [node for _, _, node in tree._heap]
    assert len(set(queued)) == len(queued), "two entries of a node in the heap"
    assert set(queued) == {node for node in nodes if node.queued}
    assert all(node.queued for node in nodes if not (node.locks or node.children)), "a leaf that is never evicted"

    rows = [r.row for r in holding]
    assert sorted(rows + scheduler._free_rows) == list(range(config.max_running_requests))
    assert {r.id for r in scheduler.running} == {r.id for r in holding if r.finish_reason is None}
    assert all(r.in_flight for r in holding if r.finish_reason is not None), "an ended request holds pages for nothing"
    for queue in (scheduler.waiting, scheduler.running):
        assert queue == sorted(queue, key=precedence)


def check_whole(scheduler: Scheduler) -> None:
    """Nothing runs, and all pages come back once the prefix cache is emptied."""
    assert [*scheduler.waiting, *scheduler.running, *scheduler._requests] == []
    check_pool(scheduler, [])
    tree, pages = scheduler.cache.prefix, scheduler.cache.pages
    tree.evict(pages.capacity)
    assert (pages.num_free, tree.num_pages, tree._heap, tree.root.children) == (pages.capacity, 0, [], {})


def code_lines(path: Path) -> int:
    """Lines of code in a file: no blanks, no comments, no docstrings."""
    source = path.read_text(encoding="utf-8")
    docs = set[int]()
    for node in ast.walk(ast.parse(source)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node, clean=False) is not None:
            docs |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    code = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - docs)


_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
