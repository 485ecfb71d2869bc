"""Tasks 09.1 to 09.8 together: several ranks, threads here, compute what one process computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl.config import EngineConfig
from minisgl.engine.engine import Engine
from tests.distributed.group import engine_on_threads, in_threads, logits_of, rank_logits
from tests.helpers import hf_state, request, serve, tiny_model
from tests.tolerances import TINY_LOGITS

IDS = torch.randint(101, (23,), generator=torch.Generator().manual_seed(1))
SHAPE = {"num_heads": 6, "num_kv_heads": 2, "intermediate_size": 48, "vocab_size": 101, "attention_bias": True}
PROMPTS = [[3, 99, 14, 15, 92], [3, 99, 14], [7] * 30, [3, 99, 14, 15, 92, 8, 97]]


def model(**shape: Any) -> Any:
    return tiny_model(**SHAPE | shape)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "shape",
    [{}, {"tie_word_embeddings": True, "mlp_bias": True}, {"architecture": "Qwen3ForCausalLM", "num_kv_heads": 3}],
    ids=["llama", "tied-biased", "qwen3"],
)
def test_logits_are_those_of_one_process(shape, size):
    whole = model(**shape)
    results = in_threads(size, rank_logits, whole.config, hf_state(whole), IDS)

    TINY_LOGITS.check(results[0], logits_of(whole, IDS))
    assert all(torch.equal(result, results[0]) for result in results), "ranks that differ would choose on their own"


def test_a_step_has_two_sums_a_layer_one_for_the_embedding_and_one_gather():
    whole = model(num_layers=3)

    def calls(comm):
        rank_logits(comm, whole.config, hf_state(whole), IDS)
        return comm.calls

    assert in_threads(2, calls) == [{"all_reduce": 2 * 3 + 1, "all_gather": 1}] * 2


EACH = {
    "greedy": [{}] * 4,
    "each-its-own": [
        {"temperature": 0.9, "seed": 1},
        {"temperature": 0.9, "top_k": 5, "seed": 2},
        {"repetition_penalty": 1.3},
        {},
    ],
}


def answers(engine: Engine, params: list[dict[str, Any]]) -> list[list[int]]:
    each = zip(PROMPTS, params, strict=True)
    done = serve(engine, *(request(i, p, **{"max_tokens": 7} | own) for i, (p, own) in enumerate(each)))
    return [r.output for r in done]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("params", EACH.values(), ids=EACH.keys())
def test_answers_are_those_of_one_process(params, overlap, size):
    switches: dict[str, Any] = {"attention": "torch", "kernels": "torch", "graphs": "off"}
    sizes = {"kv_pages": 40, "page_size": 4, "max_running_requests": 4, "max_batch_tokens": 16}
    config, whole = EngineConfig(**switches, **sizes, overlap=overlap), model()
    expected = answers(Engine(whole, config), params)

    engine = engine_on_threads(whole, config, size)
    try:
        assert answers(engine, params) == expected
    finally:
        engine.close()
