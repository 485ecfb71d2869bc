from __future__ import annotations

import json
import weakref
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import save_file

from minisgl.models import BadCheckpoint
from minisgl.models.llama import LlamaForCausalLM
from minisgl.models.register import build_model
from minisgl.models.weight import iter_weights, load_weights, random_weights
from tests.helpers import hf_state, tiny_config, tiny_model

CPU = torch.device("cpu")
Q_PROJ, K_PROJ = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture
def checkpoint() -> dict[str, torch.Tensor]:
    return hf_state(tiny_model(attention_bias=True))


def load(weights, dtype: torch.dtype = torch.float32, **overrides) -> LlamaForCausalLM:
    model = build_model(tiny_config(**{"attention_bias": True} | overrides))
    load_weights(model, weights.items() if isinstance(weights, dict) else weights, CPU, dtype)
    return model


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def test_a_model_is_built_without_memory():
    assert all(parameter.is_meta for parameter in build_model(tiny_config()).parameters())


def test_every_tensor_of_a_file_reaches_its_place(checkpoint, tmp_path):
    save_file(checkpoint, tmp_path / "model.safetensors")

    assert_same(hf_state(load(iter_weights(tmp_path))), checkpoint)


def test_merged_projections_stack_q_k_and_v_in_this_order(checkpoint):
    qkv = load(checkpoint).model.layers[1].self_attn.qkv_proj

    parts = [checkpoint[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
    biases = [checkpoint[f"model.layers.1.self_attn.{part}_proj.bias"] for part in "qkv"]
    assert torch.equal(qkv.weight, torch.cat(parts))
    assert torch.equal(qkv.bias, torch.cat(biases))


def test_the_index_of_a_sharded_checkpoint_is_followed(checkpoint, tmp_path):
    write_shards(checkpoint, tmp_path)
    (tmp_path / "consolidated.safetensors").write_bytes(b"not in the index")

    assert_same(hf_state(load(iter_weights(tmp_path))), checkpoint)


def test_a_shard_that_the_index_names_must_exist(checkpoint, tmp_path):
    write_shards(checkpoint, tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()

    with pytest.raises(BadCheckpoint, match=r"lacks model-00001-of-00002\.safetensors named by .*index\.json"):
        next(iter_weights(tmp_path))


def write_shards(checkpoint, folder) -> None:
    names = sorted(checkpoint)
    shards = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    for shard, members in shards.items():
        save_file({name: checkpoint[name] for name in members}, folder / shard)
    weight_map = {name: shard for shard, members in shards.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_folder_without_safetensors_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()

    with pytest.raises(BadCheckpoint, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        next(iter_weights(tmp_path))


@pytest.mark.parametrize("keep", [0, 5, 1000])
def test_a_truncated_file_is_called_damaged(checkpoint, tmp_path, keep: int):
    path = tmp_path / "model.safetensors"
    save_file(checkpoint, path)
    path.write_bytes(path.read_bytes()[:keep])

    with pytest.raises(BadCheckpoint, match=r"model\.safetensors is damaged .*: fetch the model again"):
        next(iter_weights(tmp_path))


def test_missing_tensors_are_counted_and_named(checkpoint):
    del checkpoint["model.norm.weight"], checkpoint[K_PROJ]

    with pytest.raises(BadCheckpoint, match=f"2 missing: {K_PROJ}, model.norm.weight$"):
        load(checkpoint)


def test_only_the_first_of_many_names_are_shown(checkpoint):
    few = {name: tensor for name, tensor in checkpoint.items() if "layers.1" not in name}

    with pytest.raises(BadCheckpoint, match=r"13 missing: (model\.layers\.1\.[\w.]+, ){3}…$"):
        load(few)


def test_left_over_tensors_are_named(checkpoint):
    checkpoint["model.layers.2.mlp.up_proj.weight"] = torch.zeros(52, 36)

    with pytest.raises(BadCheckpoint, match=r"1 left over: model\.layers\.2\.mlp\.up_proj\.weight$"):
        load(checkpoint)


def test_a_bias_that_the_config_does_not_announce_is_left_over(checkpoint):
    with pytest.raises(BadCheckpoint, match=r"8 left over: .*_proj\.bias"):
        load(checkpoint, attention_bias=False)


@pytest.mark.parametrize("shape", [(36, 60), (20, 36), (60,), (1, 36)])
def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(checkpoint, shape):
    checkpoint[Q_PROJ] = torch.zeros(shape)

    with pytest.raises(BadCheckpoint) as refusal:
        load(checkpoint)

    assert f"1 of the wrong shape: {Q_PROJ} {list(shape)} for [60, 36]" in str(refusal.value)


def test_a_tensor_given_twice_is_named(checkpoint):
    with pytest.raises(BadCheckpoint, match=f"1 given twice: {Q_PROJ}$"):
        load([*checkpoint.items(), (Q_PROJ, checkpoint[Q_PROJ])])


def test_integers_are_not_taken_for_weights(checkpoint):
    checkpoint[Q_PROJ] = torch.zeros(60, 36, dtype=torch.int8)

    with pytest.raises(BadCheckpoint, match=f"1 of a kind that needs dequantisation: {Q_PROJ} torch.int8$"):
        load(checkpoint)


def test_all_problems_are_told_at_once(checkpoint):
    checkpoint["extra"] = checkpoint.pop("model.norm.weight")

    with pytest.raises(BadCheckpoint, match=r"1 left over: extra; 1 missing: model\.norm\.weight"):
        load(checkpoint)


def test_a_tied_model_accepts_a_head_that_equals_its_embedding(checkpoint):
    head = checkpoint["lm_head.weight"]
    checkpoint["model.embed_tokens.weight"] = head.clone()

    model = load(checkpoint, torch.bfloat16, tie_word_embeddings=True)  # the head comes first or last in the file
    load(reversed(checkpoint.items()), tie_word_embeddings=True)

    assert model.lm_head is None
    assert torch.equal(model.model.embed_tokens.weight, head.bfloat16())


def test_a_tied_model_refuses_a_head_of_its_own(checkpoint):
    with pytest.raises(BadCheckpoint, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load(checkpoint, tie_word_embeddings=True)


def test_an_untied_model_needs_its_head(checkpoint):
    del checkpoint["lm_head.weight"]

    with pytest.raises(BadCheckpoint, match=r"1 missing: lm_head\.weight$"):
        load(checkpoint)


def test_old_rotary_buffers_are_skipped(checkpoint):
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5)}

    assert_same(hf_state(load(checkpoint | buffer)), checkpoint)


def test_parameters_have_the_dtype_asked_for_and_no_gradient(checkpoint):
    model = load(checkpoint, torch.bfloat16)

    assert {(p.dtype, p.device, p.requires_grad) for p in model.parameters()} == {(torch.bfloat16, CPU, False)}
    assert torch.equal(model.lm_head.weight, checkpoint["lm_head.weight"].bfloat16())


def test_tensors_are_taken_one_by_one(checkpoint):
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for name, tensor in checkpoint.items():
            fresh = tensor.clone()
            alive.add(fresh)
            most = max(most, len(alive))
            yield name, fresh

    load(stream())

    assert most <= 2  # the one being stored and the next


def random_model(seed: int, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    model = build_model(tiny_config(vocab_size=2000, attention_bias=True))
    random_weights(model, seed, CPU, dtype)
    return model


def test_random_weights_follow_their_seed():
    assert_same(hf_state(random_model(3)), hf_state(random_model(3)))
    assert not torch.equal(random_model(3).lm_head.weight, random_model(4).lm_head.weight)


def test_random_norms_are_one_and_all_else_has_the_deviation():
    for name, parameter in random_model(3).named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all(), name
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.4), name
    assert random_model(3).lm_head.weight.std().item() == pytest.approx(0.02, rel=0.02)


def test_random_weights_in_16_bits_are_the_rounding_of_those_in_32():
    narrow, wide = hf_state(random_model(3, torch.bfloat16)), hf_state(random_model(3))

    assert_same(narrow, {name: tensor.bfloat16() for name, tensor in wide.items()})
