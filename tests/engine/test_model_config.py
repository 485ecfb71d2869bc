from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import transformers

from minisgl.layers.rotary import RopeConfig
from minisgl.models import BadCheckpoint, UnsupportedModel
from minisgl.models.config import DEFAULTS, HARMLESS, ModelConfig
from minisgl.models.register import MODELS
from tests.helpers import ROPES, hf_json, tiny_config

SMOLLM2 = json.loads(
    """{"_name_or_path": "./smollm2", "architectures": ["LlamaForCausalLM"], "attention_bias": false,
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576,
    "initializer_range": 0.041666666666666664, "intermediate_size": 1536, "is_llama_config": true,
    "max_position_embeddings": 8192, "mlp_bias": false, "model_type": "llama", "num_attention_heads": 9,
    "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_interleaved": false, "rope_scaling": null, "rope_theta": 100000, "tie_word_embeddings": true,
    "torch_dtype": "bfloat16", "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "transformers_version": "4.42.3", "use_cache": true, "vocab_size": 49152}"""
)
QWEN3 = json.loads(
    """{"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "bos_token_id": 151643,
    "attention_dropout": 0.0, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 1024, "initializer_range": 0.02,
    "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": true,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true, "use_sliding_window": false,
    "vocab_size": 151936}"""
)
LLAMA32 = json.loads(
    """{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "bos_token_id": 128000,
    "attention_dropout": 0.0, "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072,
    "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16,
    "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0,
    "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0", "use_cache": true, "vocab_size": 128256}"""
)


def llama(**fields: Any) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | fields


def test_smollm2s_config_is_read_in_full():
    assert ModelConfig.from_hf(SMOLLM2) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        rope=RopeConfig(rope_theta=100000),
        eos_token_ids=(2,),
        dtype="bfloat16",
    )


def test_qwen3s_heads_are_wider_than_its_hidden_size():
    config = ModelConfig.from_hf(QWEN3, {"eos_token_id": [151645, 151643], "temperature": 0.6})

    assert (config.head_dim, config.num_heads, config.hidden_size) == (128, 16, 1024)
    assert config.eos_token_ids == (151645, 151643)


def test_llama_3_2_brings_its_rope_scaling_and_three_end_of_sequence_tokens():
    config = ModelConfig.from_hf(LLAMA32)

    assert config.rope == RopeConfig("llama3", 500000.0, 32.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    assert config.eos_token_ids == (128001, 128008, 128009)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
@pytest.mark.parametrize("architecture", MODELS)
def test_what_transformers_writes_is_read_back(architecture: str, rope: RopeConfig):
    config = tiny_config(architecture=architecture, rope=rope, dtype="bfloat16", tie_word_embeddings=True)

    written = transformers.AutoConfig.for_model(**hf_json(config)).to_dict()

    assert ModelConfig.from_hf(json.loads(json.dumps(written, default=lambda dtype: str(dtype)[6:]))) == config


@pytest.mark.parametrize("architecture", MODELS)
def test_missing_fields_take_transformers_defaults(architecture: str):
    theirs = getattr(transformers, architecture).config_class()

    ours = ModelConfig.from_hf({"architectures": [architecture]})

    renamed = {
        "num_layers": theirs.num_hidden_layers,
        "num_heads": theirs.num_attention_heads,
        "num_kv_heads": theirs.num_key_value_heads,
    }
    for field, value in vars(ours).items():
        if field not in ("architecture", "rope", "eos_token_ids", "dtype"):
            assert value == renamed.get(field, getattr(theirs, field, False)), field
    assert ours.rope == RopeConfig(**theirs.rope_parameters)
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))


def test_null_kv_heads_mean_as_many_as_query_heads_where_absent_ones_do_not():
    qwen3 = {"architectures": ["Qwen3ForCausalLM"], "num_attention_heads": 64}

    assert ModelConfig.from_hf(qwen3).num_kv_heads == 32
    assert ModelConfig.from_hf(qwen3 | {"num_key_value_heads": None}).num_kv_heads == 64


def test_every_architecture_has_defaults_and_a_model():
    assert DEFAULTS.keys() == MODELS.keys()


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "rope_type": "yarn", "factor": 4.0, "mscale": None}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}},
        {"rope_theta": 1.0, "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}},
        {"rope_theta": 5e5, "rope_parameters": None, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    ],
    ids=["type", "both keys", "transformers 5", "theta in both", "null beside"],
)
def test_old_and_new_rope_fields_say_the_same(fields: dict[str, Any]):
    config = llama(max_position_embeddings=4096, **fields)

    rope = ModelConfig.from_hf(config).rope

    theirs = transformers.LlamaConfig(**json.loads(json.dumps(config))).rope_parameters
    assert rope == RopeConfig("yarn", 5e5, 4.0, original_max_position_embeddings=4096)
    assert rope == RopeConfig(**{k: v for k, v in theirs.items() if k != "type" and v is not None})


@pytest.mark.parametrize(
    ("in_config", "generation_config", "expected"),
    [
        (5, None, (5,)),
        ([5, 6], None, (5, 6)),
        (5, {}, (5,)),
        (5, {"eos_token_id": None}, (5,)),
        (5, {"eos_token_id": 0}, (0,)),
        (5, {"eos_token_id": [8, 9]}, (8, 9)),
        (None, None, ()),
    ],
)
def test_end_of_sequence_ids_come_from_the_generation_config_or_else_the_config(in_config, generation_config, expected):
    assert ModelConfig.from_hf(llama(eos_token_id=in_config), generation_config).eos_token_ids == expected


def test_a_harmless_field_changes_nothing():
    config = hf_json(tiny_config())

    assert ModelConfig.from_hf(config | dict.fromkeys(HARMLESS, 7)) == ModelConfig.from_hf(config)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("use_sliding_window", True),
        ("rope_interleaved", True),
        ("pretraining_tp", 2),
        ("partial_rotary_factor", 0.5),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("quantization_config", {"quant_method": "gptq"}),
        ("logits_scaling", 8.0),
        ("is_encoder_decoder", True),
        ("dtype", "float8_e4m3fn"),
        ("hidden_size", 0),
        ("num_hidden_layers", "2"),
        ("num_key_value_heads", 5),
        ("head_dim", 15),
    ],
)
def test_a_value_that_is_not_implemented_is_refused_by_name(field: str, value: object):
    with pytest.raises(UnsupportedModel, match=f"config field {field} is"):
        ModelConfig.from_hf(llama(**{field: value}))


def test_a_field_of_another_architecture_is_refused():
    with pytest.raises(UnsupportedModel, match="mlp_bias is True"):
        ModelConfig.from_hf({"architectures": ["Qwen3ForCausalLM"], "mlp_bias": True})


def test_fields_that_say_what_minisgl_does_anyway_are_accepted():
    config = hf_json(tiny_config())
    same = {"layer_types": ["full_attention"] * 2, "pretraining_tp": 1, "quantization_config": None, "use_cache": False}

    assert ModelConfig.from_hf(config | same) == tiny_config()


@pytest.mark.parametrize("architectures", [None, [], ["MixtralForCausalLM"], ["LlamaForCausalLM", "Qwen3ForCausalLM"]])
def test_an_unknown_architecture_is_refused_by_name(architectures: list[str] | None):
    with pytest.raises(UnsupportedModel) as refusal:
        ModelConfig.from_hf({"architectures": architectures})

    assert f"{architectures or []}: minisgl runs LlamaForCausalLM or Qwen3ForCausalLM" in str(refusal.value)


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type is dynamic"),
        ({"rope_type": "longrope", "factor": 2.0}, "rope_type is longrope"),
        ({"rope_type": "linear"}, "factor of rope_type linear is None"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor of rope_type llama3"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 16}, "beta_fast of rope_type linear is 16"),
        ({"rope_type": "yarn", "factor": 2.0, "finetuned": True}, "finetuned of rope_type yarn is True"),
        ({"rope_type": "default", "partial_rotary_factor": 0.25}, "partial_rotary_factor"),
    ],
)
def test_a_rope_that_is_not_implemented_is_refused_by_name(rope: dict[str, Any], named: str):
    with pytest.raises(UnsupportedModel, match=named):
        ModelConfig.from_hf(llama(rope_scaling=rope))


def test_a_head_size_that_does_not_follow_from_the_hidden_size_must_be_given():
    shape = {"hidden_size": 90, "num_attention_heads": 4}

    with pytest.raises(UnsupportedModel, match=r"head_dim is 22\.5"):
        ModelConfig.from_hf(llama(**shape))
    assert ModelConfig.from_hf(llama(head_dim=22, **shape)).head_dim == 22


def test_a_folder_is_read_with_its_generation_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf_json(tiny_config())))
    assert ModelConfig.from_folder(tmp_path) == tiny_config()

    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert ModelConfig.from_folder(tmp_path) == replace(tiny_config(), eos_token_ids=(3, 4))


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(BadCheckpoint, match=r"holds no config\.json"):
        ModelConfig.from_folder(tmp_path)


def test_a_damaged_config_is_refused_with_its_path(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": [')

    with pytest.raises(BadCheckpoint, match=r"config\.json is not JSON .*: fetch the model again"):
        ModelConfig.from_folder(tmp_path)
