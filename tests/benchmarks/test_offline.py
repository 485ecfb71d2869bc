"""The arithmetic of `minisgl bench offline`; no speed is tested here."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from benchmarks.offline import limit, run, workload
from minisgl.config import EngineConfig
from minisgl.llm import LLM
from minisgl.models.config import ModelConfig
from minisgl.models.llama import LlamaForCausalLM
from tests.helpers import tiny_config

QWEN3 = Path(__file__).parents[2] / "benchmarks/shapes/qwen3-0.6b"


def test_the_workload_is_the_published_one():
    prompts, outputs = workload(seed=0)
    assert len(prompts) == len(outputs) == 256
    assert sum(map(len, prompts)) == 142_827
    assert sum(outputs) == 133_966


def test_a_scaled_workload_has_the_same_requests_shorter():
    (prompts, outputs), (small, fewer) = workload(3, requests=9), workload(3, requests=9, scale=0.1, max_output=20)
    assert [len(p) for p in small] == [round(len(p) / 10) for p in prompts]
    assert all(p[: len(s)] == s for p, s in zip(prompts, small, strict=True))
    assert fewer == [min(round(n / 10), 20) for n in outputs]


def test_the_limit_on_an_h200_is_about_36_400_tokens_per_second_for_the_qwen3_shape():
    prompts, outputs = workload(seed=0)
    least = limit(ModelConfig.from_folder(QWEN3), torch.bfloat16, [len(p) for p in prompts], outputs, 4.28e12, 791e12)
    assert least.kv_bytes == pytest.approx(13.9e12, rel=0.01)
    assert least.weight_bytes == pytest.approx(1.22e12, rel=0.01)
    assert least.prefill_flops / 791e12 == pytest.approx(0.17, rel=0.03)
    assert sum(outputs) / least.seconds == pytest.approx(36_400, rel=0.01)


def test_the_limit_counts_the_bytes_of_a_decode_that_can_be_counted_by_hand():
    config = tiny_config()  # 2 layers, 2 KV heads of 10
    least = limit(config, torch.float32, [5, 1], [3, 1], bytes_per_s=1.0, flops_per_s=float("inf"))
    assert least.kv_bytes == 2 * 2 * 2 * 10 * 4 * (6 + 7)  # the second request ends with its prefill
    with torch.device("meta"):
        weights = sum(p.numel() for p in LlamaForCausalLM(config).parameters())
    embedding = config.vocab_size * config.hidden_size  # untied here: a few rows of it are read
    assert least.weight_bytes == 3 * 4 * (weights - embedding)
    assert least.seconds == least.kv_bytes + least.weight_bytes


def test_a_pass_answers_every_request_in_full(tiny_folder):
    args = argparse.Namespace(requests=5, scale=0.05, max_output=20, temperature=0.6)
    with LLM(EngineConfig(model=str(tiny_folder), device="cpu", dtype="float32")) as llm:
        done = run(llm, 0, args)
    prompts, outputs = workload(0, 5, 0.05, 20)
    assert done["prompt_tokens"] == sum(map(len, prompts))
    assert done["output_tokens"] == sum(outputs)
    assert done["work"]["tokens_computed"] == done["prompt_tokens"] + done["output_tokens"] - 5
    assert done["work"]["steps"] == max(outputs)  # all together, which is what the limit assumes


def test_a_request_that_cannot_be_served_ends_the_benchmark(tiny_folder):
    args = argparse.Namespace(requests=5, scale=1.0, max_output=20, temperature=0.6)
    with (
        LLM(EngineConfig(model=str(tiny_folder), device="cpu", max_model_len=200)) as llm,
        pytest.raises(ValueError, match="of 5 requests failed"),
    ):
        run(llm, 0, args)
