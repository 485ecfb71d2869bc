"""What ranks say to each other: counted without memory as real ranks say it, and what the prediction makes of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import ch09_bytes
from benchmarks.ch09_bytes import (
    FREE,
    LINKS,
    Link,
    Recorder,
    collectives,
    held,
    predicted_parts_s,
    predicted_step_s,
    summary,
)
from minisgl.models.register import build_model
from minisgl.models.weight import load_weights
from tests.distributed.group import in_threads, logits_of
from tests.helpers import hf_state, tiny_config, tiny_model

SHAPE = {"num_heads": 12, "num_kv_heads": 3, "head_dim": 8, "intermediate_size": 48, "vocab_size": 101}
IDS = torch.tensor([5, 100, 0])


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("size", [2, 4])
def test_the_counts_are_those_of_ranks_that_compute(size, tied):
    whole = tiny_model(**SHAPE, tie_word_embeddings=tied)
    weights = hf_state(whole)

    def calls(comm):
        recorder = Recorder(comm.rank, comm.size, comm)
        model = build_model(whole.config, comm=recorder)
        load_weights(model, weights.items(), torch.device("cpu"), torch.float32)
        recorder.watch(model)
        torch.testing.assert_close(logits_of(model, IDS), logits_of(whole, IDS), rtol=1e-4, atol=1e-4)
        return recorder.calls

    counted = collectives(whole.config, size, len(IDS), torch.float32)
    assert in_threads(size, calls) == [counted] * size


def test_calls_are_named_by_the_layers_that_make_them():
    named = [(call.where, call.collective) for call in collectives(tiny_config(**SHAPE), 2)]
    layers = [
        (f"model.layers.{i}.{name}", "all_reduce") for i in (0, 1) for name in ("self_attn.o_proj", "mlp.down_proj")
    ]
    assert named == [("model.embed_tokens", "all_reduce"), *layers, ("head", "all_gather")]


def test_one_rank_says_nothing():
    assert collectives(tiny_config(**SHAPE), 1) == []


@pytest.mark.parametrize(("size", "reduced", "gathered"), [(2, 1, 1), (4, 1.5, 3)])
def test_a_ring_sends_each_byte_so_often(size, reduced, gathered):
    for call in collectives(tiny_config(**SHAPE), size):
        assert call.sent_bytes == call.bytes * (reduced if call.collective == "all_reduce" else gathered)


def test_more_rows_are_as_many_calls_of_as_many_times_the_bytes():
    one, many = (summary(collectives(tiny_config(**SHAPE), 4, rows)) for rows in (1, 7))
    assert many["calls"] == one["calls"] == 6
    assert (many["bytes"], many["sent_bytes"]) == (7 * one["bytes"], 7 * one["sent_bytes"])


def test_kv_heads_that_ranks_share_do_not_shrink_with_them():
    config = tiny_config(**SHAPE | {"num_kv_heads": 2})
    kv = [held(config, tp)["kv_bytes_per_token"] for tp in (1, 2, 4)]
    assert kv == [kv[0], kv[0] / 2, kv[0] / 2]


def test_of_an_untied_model_the_head_is_read_and_the_table_is_not():
    for tied in (True, False):
        config = tiny_config(**SHAPE, tie_word_embeddings=tied)
        found = held(config, 1)
        assert found["weight_bytes"] - found["read_bytes"] == (0 if tied else 2 * 101 * 36)


def test_the_prediction_is_reading_and_then_each_call():
    config, link = tiny_config(**SHAPE), Link("slow", bytes_per_s=1000, call_s=0.5, source="")
    sent = sum(call.sent_bytes for call in collectives(config, 2))
    rest = predicted_step_s(config, 2, link, batch=3) - predicted_step_s(config, 2, FREE, batch=3)
    assert rest == pytest.approx(6 * 0.5 + 3 * sent / 1000)
    assert predicted_step_s(config, 1, link) == predicted_step_s(config, 1, FREE)


def test_arithmetic_counts_where_it_takes_longer_than_reading_the_weights():
    config = tiny_config(**SHAPE)
    read = held(config, 2)["read_bytes"]
    few, many = (predicted_parts_s(config, 2, FREE, batch, 0, 1.0, 10.0) for batch in (5, 25))
    assert few == {"memory": read, "arithmetic": 0, "calls": 0, "bytes": 0}
    assert many["memory"] + many["arithmetic"] == pytest.approx(25 * read / 10)  # 2 operations for each 2 bytes


def test_a_small_model_loses_by_two_ranks_and_a_large_one_wins():
    small = ch09_bytes.shape("qwen3-0.6b")
    large = replace(small, hidden_size=8192, num_heads=64, intermediate_size=28672)
    for link in LINKS.values():
        assert predicted_step_s(small, 2, link) > predicted_step_s(small, 1, link)
        assert predicted_step_s(large, 2, link) < predicted_step_s(large, 1, link)


def test_the_saved_counts_are_those_of_the_code():
    saved = ch09_bytes.load("ch09_bytes")["data"]["shapes"]["qwen3-0_6b"]["4"]
    config = ch09_bytes.shape("qwen3-0.6b")
    assert saved["row"] == json.loads(json.dumps(summary(collectives(config, 4))))
    assert {name: saved[name] for name in held(config, 4)} == held(config, 4)
