"""A 7-billion shape beside transformers: the shape, the bytes of a token, and both engines on a tiny model."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from benchmarks import llama7b
from minisgl.models.config import ModelConfig
from minisgl.models.llama import LlamaForCausalLM


def test_the_shape_is_that_of_llama_2_7b():
    with torch.device("meta"):
        model = LlamaForCausalLM(ModelConfig.from_folder(Path(llama7b.MODEL)))
    assert sum(p.numel() for p in model.parameters()) == 6_738_415_616


def test_a_token_needs_the_weights_but_one_table_and_all_k_and_v():
    needed = llama7b.bytes_per_token(ModelConfig.from_folder(Path(llama7b.MODEL)), torch.bfloat16, 512, 128)
    weights = 2 * (6_738_415_616 - 32_000 * 4096)
    kv = 2 * 2 * 32 * 32 * 128
    assert needed == weights + kv * (513 + 639) / 2


@pytest.mark.parametrize("engine", llama7b.ENGINES)
def test_each_engine_answers_all_requests_in_full(tiny_folder, engine, monkeypatch):
    monkeypatch.setattr(llama7b.offline, "speeds", lambda *_: {})
    args = argparse.Namespace(
        model=str(tiny_folder), device="cpu", dtype="float32", requests=3, prompt=6, output=4, temperature=0.6, seed=[0]
    )
    found = llama7b.ENGINES[engine](args)
    for name, requests in (("batch", 3), ("alone", 1)):
        part = found[name]
        assert part["requests"] == requests
        assert part["requests_per_s"] == pytest.approx(requests / part["seconds"])
        assert part["tokens_per_s"] == pytest.approx(4 * part["requests_per_s"])
        assert part["first_token_ms"]["p50"] / 1000 + 3 * part["token_ms"] / 1000 <= part["seconds"] * 1.001
