"""What each rank holds of a model, and that the ranks together compute what one process computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from minisgl.distributed.comm import ALONE
from minisgl.layers.embedding import Embedding, SplitEmbedding
from minisgl.layers.linear import RowLinear
from minisgl.layers.shard import even_shard, head_shard, kv_heads_of
from minisgl.models import BadCheckpoint
from minisgl.models.config import ModelConfig
from minisgl.models.register import MODELS, build_model
from minisgl.models.weight import iter_weights, random_weights
from tests.distributed.group import (
    Seat,
    collectives_and_logits,
    in_processes,
    in_threads,
    load_rank,
    logits_of,
    rank_logits,
    seats,
    sum_in_a_graph,
)
from tests.helpers import hf_state, tiny_config, tiny_model
from tests.tolerances import SMOLLM2_LOGITS, TINY_LOGITS

CPU = torch.device("cpu")
SIZES = [2, 3, 4]
IDS = torch.randint(101, (23,), generator=torch.Generator().manual_seed(1))
BIASED = {"attention_bias": True, "mlp_bias": True}


def shape(**overrides: Any) -> dict[str, Any]:
    """A tiny config that 2, 3 and 4 ranks divide, but for the vocabulary and KV heads."""
    return {"num_heads": 12, "num_kv_heads": 3, "intermediate_size": 48} | overrides


# The same logits


def check_logits(size: int, **overrides: Any) -> None:
    whole = tiny_model(**shape(**overrides))
    results = in_threads(size, rank_logits, whole.config, hf_state(whole), IDS)

    TINY_LOGITS.check(results[0], logits_of(whole, IDS))
    assert all(torch.equal(result, results[0]) for result in results), "ranks that differ would sample on their own"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 12])
@pytest.mark.parametrize("architecture", MODELS)
def test_logits_are_those_of_one_process(architecture: str, kv_heads: int, size: int):
    check_logits(size, architecture=architecture, num_kv_heads=kv_heads)


VARIANTS: dict[str, dict[str, Any]] = {
    "vocabulary-101": {"vocab_size": 101},
    "tied": {"tie_word_embeddings": True},
    "tied-vocabulary-101": {"tie_word_embeddings": True, "vocab_size": 101},
    "attention-bias": {"attention_bias": True},
    "mlp-bias": {"mlp_bias": True},
    "tied-biased-qwen3": {"architecture": "Qwen3ForCausalLM", "tie_word_embeddings": True, "attention_bias": True},
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_so_are_those_of_every_variant(variant: dict[str, Any], size: int):
    check_logits(size, **variant)


def test_a_step_has_two_sums_a_layer_one_for_the_embedding_and_one_gather():
    whole = tiny_model(**shape(num_layers=3, **BIASED))

    def calls(comm):
        rank_logits(comm, whole.config, hf_state(whole), IDS)
        return comm.calls

    assert in_threads(2, calls) == [{"all_reduce": 2 * 3 + 1, "all_gather": 1}] * 2


def test_one_process_looks_tokens_up_without_a_mask():
    assert type(build_model(tiny_config()).model.embed_tokens) is Embedding


# Which part


@pytest.mark.parametrize(
    ("whole", "size", "ranges"),
    [
        (12, 1, [(0, 12)]),
        (12, 3, [(0, 4), (4, 8), (8, 12)]),
        (101, 2, [(0, 51), (51, 101)]),
        (101, 4, [(0, 26), (26, 52), (52, 78), (78, 101)]),
        (5, 4, [(0, 2), (2, 4), (4, 5), (5, 5)]),
    ],
)
def test_ranges_are_equally_long_and_the_last_ones_end_early(whole: int, size: int, ranges: list[tuple[int, int]]):
    assert [even_shard(whole, seat).ranges for seat in seats(size)] == [(found,) for found in ranges]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "held"),
    [
        (12, 4, [[0, 1], [2, 3]]),
        (12, 2, [[0], [1]]),
        (12, 12, [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]),
        (9, 3, [[0], [1], [2]]),
        (12, 1, [[0], [0], [0], [0]]),  # more ranks than KV heads
        (12, 2, [[0], [0], [1], [1]]),
        (12, 3, [[0, 0, 1], [1, 2, 2]]),  # query heads 4 … 7 of KV head 1 lie on both
        (12, 2, [[0, 0], [0, 1], [1, 1]]),
        (12, 3, [[0, 0, 0], [0, 1, 1], [1, 1, 2], [2, 2, 2]]),
    ],
)
def test_a_rank_holds_the_kv_heads_that_its_query_heads_read(heads: int, kv_heads: int, held: list[list[int]]):
    assert [kv_heads_of(heads, kv_heads, seat) for seat in seats(len(held))] == held


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8, 12, 24])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 6, 8, 12, 24])
def test_each_query_head_finds_its_own_kv_head(kv_heads: int, size: int):
    for seat in seats(size):
        held, local = kv_heads_of(24, kv_heads, seat), 24 // size
        read = [held[i // (local // len(held))] for i in range(local)]
        assert read == [(seat.rank * local + i) // (24 // kv_heads) for i in range(local)]


def test_rows_of_neighbouring_heads_are_one_range():
    assert head_shard([2, 3, 5, 5, 6], 10, 80).ranges == ((20, 40), (50, 60), (50, 70))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kv_heads", [1, 2, 3])
def test_a_model_says_how_many_kv_heads_its_pool_needs(kv_heads: int, size: int):
    seat = Seat(1, size)
    model = build_model(tiny_config(**shape(num_kv_heads=kv_heads)), comm=seat)

    assert model.num_kv_heads == len(kv_heads_of(12, kv_heads, seat))
    assert {layer.self_attn.num_kv_heads for layer in model.model.layers} == {model.num_kv_heads}
    assert model.config.num_kv_heads == kv_heads


@pytest.mark.parametrize(
    ("overrides", "size", "refusal"),
    [
        ({"num_heads": 9, "num_kv_heads": 3}, 2, "9 query heads do not divide by tp 2: choose a divisor of 9"),
        ({"num_heads": 6}, 12, "6 query heads do not divide by tp 12"),
        ({"num_heads": 6, "intermediate_size": 52}, 3, "52 features of the MLP do not divide by tp 3"),
    ],
)
def test_what_does_not_divide_is_refused_with_its_reason(overrides: dict[str, Any], size: int, refusal: str):
    with pytest.raises(ValueError, match=refusal):
        build_model(tiny_config(**overrides), comm=Seat(0, size))


# Weights


def numbered(config: ModelConfig) -> dict[str, torch.Tensor]:
    """A checkpoint in which each number stands once, from 1 on, and is exact in fp32."""
    checkpoint, at = {}, 1
    for name, tensor in hf_state(tiny_model(**vars(config))).items():
        checkpoint[name] = torch.arange(at, at + tensor.numel(), dtype=torch.float32).view(tensor.shape)
        at += tensor.numel()
    assert at < 2**24
    return checkpoint


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_ranks_shards_together_are_the_checkpoint(tied: bool, size: int):
    config = tiny_config(**shape(vocab_size=101, tie_word_embeddings=tied, **BIASED))
    checkpoint = numbered(config)
    ranks = [hf_state(load_rank(seat, config, checkpoint.items())) for seat in seats(size)]

    for name, full in checkpoint.items():
        shards = [rank[name] for rank in ranks]
        if ".k_proj." in name or ".v_proj." in name:
            rows = full.split(config.head_dim)
            held = [kv_heads_of(12, 3, seat) for seat in seats(size)]
            assert {head for heads in held for head in heads} == {0, 1, 2}
            expected = [torch.cat([rows[head] for head in heads]) for heads in held]
        elif name.endswith(("norm.weight", "o_proj.bias", "down_proj.bias")):
            expected = [full] * size
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            expected = full.chunk(size, dim=1)
        else:
            padding = full.new_zeros(-len(full) % size, *full.shape[1:])
            expected = torch.cat([full, padding]).chunk(size)
            assert not len(padding) or name in ("model.embed_tokens.weight", "lm_head.weight")
        assert all(torch.equal(one, other) for one, other in zip(shards, expected, strict=True)), name


@pytest.mark.parametrize("size", [1, *SIZES])
def test_random_weights_are_one_model_for_any_number_of_ranks(size: int):
    config = tiny_config(**shape(vocab_size=101, **BIASED))
    whole = build_model(config)
    random_weights(whole, 3, CPU, torch.float32)

    for seat in seats(size):
        model = build_model(config, comm=seat)
        random_weights(model, 3, CPU, torch.float32)
        expected = load_rank(seat, config, hf_state(whole).items()).state_dict()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


class OnDisk(torch.Tensor):
    """A tensor of a file: counts the bytes that are read of it, which of a narrow view are those of the view."""

    read = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            plain = [arg.as_subclass(torch.Tensor) if isinstance(arg, OnDisk) else arg for arg in args]
            result = function(*plain, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            OnDisk.read += (result if function is torch.Tensor.narrow else plain[0]).nbytes
        return result


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_rank_reads_no_more_than_it_holds(tied: bool, size: int, monkeypatch):
    config = tiny_config(**shape(vocab_size=120, tie_word_embeddings=tied, attention_bias=True))
    checkpoint = numbered(config)
    if tied:
        checkpoint["lm_head.weight"] = checkpoint["model.embed_tokens.weight"]
    weights = {name: tensor.as_subclass(OnDisk) for name, tensor in checkpoint.items()}
    monkeypatch.setattr(OnDisk, "read", 0)

    model = load_rank(Seat(0, size), config, weights.items())

    held = sum(parameter.nbytes for parameter in model.parameters())
    assert OnDisk.read == held + (model.model.embed_tokens.weight.nbytes if tied else 0)


def test_a_wrong_shape_is_that_of_the_whole_tensor():
    config = tiny_config(**shape(vocab_size=101))
    checkpoint = hf_state(tiny_model(**vars(config)))
    checkpoint["model.layers.0.self_attn.o_proj.weight"] = torch.zeros(36, 60)
    checkpoint["lm_head.weight"] = torch.zeros(51, 36)

    with pytest.raises(BadCheckpoint) as refusal:
        load_rank(Seat(1, 2), config, checkpoint.items())

    assert "o_proj.weight [36, 60] for [36, 120]" in str(refusal.value)
    assert "lm_head.weight [51, 36] for [101, 36]" in str(refusal.value)


def test_a_head_unlike_the_tied_embedding_is_refused_by_the_rank_that_holds_the_difference():
    config = tiny_config(**shape(vocab_size=101, tie_word_embeddings=True))
    checkpoint = hf_state(tiny_model(**vars(config)))
    head = checkpoint["model.embed_tokens.weight"].clone()
    load_rank(Seat(1, 2), config, (checkpoint | {"lm_head.weight": head}).items())
    head[100] += 1

    load_rank(Seat(0, 2), config, (checkpoint | {"lm_head.weight": head}).items())
    with pytest.raises(BadCheckpoint, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load_rank(Seat(1, 2), config, (checkpoint | {"lm_head.weight": head}).items())


@pytest.mark.parametrize("rows", [100, 102])
def test_a_tied_head_of_another_length_differs(rows: int):
    config = tiny_config(**shape(vocab_size=101, tie_word_embeddings=True))
    checkpoint = hf_state(tiny_model(**vars(config)))
    checkpoint["lm_head.weight"] = torch.cat([checkpoint["model.embed_tokens.weight"]] * 2)[:rows]

    with pytest.raises(BadCheckpoint, match=r"lm_head\.weight differs"):
        load_rank(Seat(1, 2), config, checkpoint.items())


# Layers


def filled(module: Any, full: torch.Tensor) -> Any:
    module.weight.requires_grad_(False)
    module.shards["weight"].fill(module.weight, full)
    return module


@pytest.mark.parametrize("size", [1, *SIZES])
def test_a_bias_is_added_once(size: int):
    bias = torch.tensor([0.5, -3.0, 7.0, 1.0])

    def run(comm):
        layer = filled(RowLinear(12, 4, bias=True, comm=comm), torch.zeros(4, 12)).requires_grad_(False)
        layer.bias.copy_(bias)
        return layer(torch.ones(2, 12 // size))

    for result in in_threads(size, run) if size > 1 else [run(ALONE)]:
        assert torch.equal(result, bias.expand(2, 4))


@pytest.mark.parametrize("vocab", [5, 8, 101])
def test_padding_is_never_among_the_logits(vocab: int):
    table, hidden = -torch.ones(vocab, 3), torch.ones(2, 3)  # all logits are -3: a row of zeros would be chosen

    results = in_threads(4, lambda comm: filled(Embedding(vocab, 3, comm), table).logits(hidden))

    assert all(torch.equal(result, torch.full((2, vocab), -3.0)) for result in results)


def look_up(comm: Any, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return filled(SplitEmbedding(*table.shape, comm), table)(ids)


@pytest.mark.parametrize("vocab", [5, 8, 101])
def test_each_token_is_looked_up_by_the_rank_that_holds_it(vocab: int):
    table = torch.randn(vocab, 36, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(vocab).flip(0)

    assert all(torch.equal(result, table[ids]) for result in in_threads(4, look_up, table, ids))


def test_rows_of_other_ranks_tokens_are_zero_and_not_products_with_zero():
    table = torch.ones(8, 36)
    table[[0, 3, 4, 7]] = float("inf")  # each rank's outer rows, one of which stands in for tokens that it lacks

    results = in_threads(2, look_up, table, torch.tensor([1, 5]))

    assert all(torch.equal(result, torch.ones(2, 36)) for result in results)


# Processes


def check_collectives(results: list[dict[str, Any]]) -> None:
    size = len(results)
    ranks = [torch.tensor([[r, 10.0 + r], [20.0 + r, 30.0 + r]]) for r in range(size)]
    total = torch.stack(ranks).sum(0)
    expected = {
        "sum": total,
        "sum of a view": total,
        "bf16 sum": (total + size).bfloat16(),
        "gathered": torch.cat(ranks, dim=-1),
        "gathered view": torch.cat(ranks, dim=-1),
        "gathered nothing": torch.empty(0, 2 * size),
        "of the last": ranks[-1].long(),
        "of the first": ranks[0][:, 0],
    }
    for result in results:
        assert result["least"] == 10 - (size - 1)
        for name, tensor in expected.items():
            assert torch.equal(result[name], tensor), name
            assert result[name].dtype == tensor.dtype, name


def check_processes(size: int, folder: Path, backend: str, device: str) -> None:
    overrides = shape(vocab_size=101, **BIASED)
    whole = tiny_model(**overrides)
    save_file(hf_state(whole), folder / "model.safetensors")
    given = (device, folder, overrides, IDS.tolist())

    results = in_processes(size, folder, backend, collectives_and_logits, *given)

    check_collectives(results)
    TINY_LOGITS.check(results[0]["logits"], logits_of(whole, IDS))
    assert all(torch.equal(result["logits"], results[0]["logits"]) for result in results)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_compute_together_over_gloo(size: int, tmp_path):
    check_processes(size, tmp_path, "gloo", "cpu")


def needs_gpus(count: int) -> Any:
    found = torch.cuda.device_count()
    return [pytest.mark.gpu, pytest.mark.skipif(found < count, reason=f"needs {count} GPUs, found {found}")]


@pytest.mark.parametrize("size", [pytest.param(2, marks=needs_gpus(1))])
def test_ranks_on_one_gpu_compute_together_over_gloo(size: int, tmp_path):
    check_processes(size, tmp_path, "gloo", "cuda")


@pytest.mark.parametrize("size", [pytest.param(n, marks=needs_gpus(n)) for n in (1, 2, 4)])
def test_ranks_with_a_gpu_each_compute_together_over_nccl(size: int, tmp_path):
    check_processes(size, tmp_path, "nccl", "cuda")


@pytest.mark.parametrize("size", [pytest.param(n, marks=needs_gpus(n)) for n in (1, 2, 4)])
def test_a_graph_holds_a_sum_over_nccl(size: int, tmp_path):
    for total in in_processes(size, tmp_path, "nccl", sum_in_a_graph):
        assert torch.equal(total, torch.full((1000,), size * (size + 1) / 2))


# The default model


def smollm2_logits(comm: Any, folder: Path, ids: torch.Tensor) -> torch.Tensor:
    return logits_of(load_rank(comm, ModelConfig.from_folder(folder), iter_weights(folder)), ids)


@pytest.mark.model
@pytest.mark.slow
def test_logits_of_smollm2_over_three_ranks_are_those_of_one(smollm2_path):
    results = in_threads(3, smollm2_logits, smollm2_path, IDS)

    SMOLLM2_LOGITS.check(results[0], smollm2_logits(ALONE, smollm2_path, IDS))


@pytest.mark.model
def test_smollm2s_nine_query_heads_are_refused_by_two_ranks(smollm2_path):
    with pytest.raises(ValueError, match="9 query heads do not divide by tp 2: choose a divisor of 9"):
        build_model(ModelConfig.from_folder(smollm2_path), comm=Seat(0, 2))
