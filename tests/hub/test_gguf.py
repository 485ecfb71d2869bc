"""Tiny models written to GGUF as llama.cpp's converter lays them out, and read back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from minisgl_hub.convert import convert
from minisgl_hub.gguf import BadGGUF, gguf_config, gguf_weights, open_gguf

from minisgl.layers.rotary import RopeConfig
from minisgl.models.config import ModelConfig
from minisgl.models.llama import LlamaForCausalLM
from minisgl.models.register import build_model
from minisgl.models.weight import load_weights
from tests.helpers import hf_state, tiny_model

BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in TOP:
        return f"{TOP[module]}.{kind}"
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{BLOCK[inner]}.{kind}"


def neighbours(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """llama.cpp rotates rows 2i and 2i + 1 of a head together, Hugging Face rows i and i + head_dim / 2."""
    half = head_dim // 2
    order = [
        start + pair + side * half for start in range(0, len(rows), head_dim) for pair in range(half) for side in (0, 1)
    ]
    return rows[order]


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    quantisation: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    extra_tensor: str | None = None,
) -> Path:
    config, arch = model.config, "qwen3" if model.qk_norm else "llama"
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.rope_theta)
    writer.add_eos_token_id(config.eos_token_ids[0])
    writer.add_eot_token_id(config.eos_token_ids[1])
    for key, value in (metadata or {}).items():
        {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)](
            key.format(arch=arch), value
        )
    for name, tensor in hf_state(model).items():
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            tensor = neighbours(tensor, config.head_dim)
        kind = quantisation if tensor.dim() == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), gguf.quantize(tensor.numpy(), kind), raw_dtype=kind)
    if extra_tensor:
        writer.add_tensor(extra_tensor, torch.ones(5).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(path: Path) -> LlamaForCausalLM:
    reader = open_gguf(path)
    config, generation_config = gguf_config(reader)
    model = build_model(ModelConfig.from_hf(config, generation_config))
    load_weights(model, gguf_weights(reader, config), torch.device("cpu"), torch.float32)
    return model


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_config_and_weights_come_back_as_they_were(architecture: str, tied: bool, tmp_path):
    model = tiny_model(architecture, attention_bias=True, tie_word_embeddings=tied, rope=RopeConfig(rope_theta=1e5))

    back = read(write_gguf(tmp_path / "tiny.gguf", model))

    assert back.config == model.config
    expected = hf_state(model)
    for name, tensor in hf_state(back).items():
        assert torch.equal(tensor, expected[name]), name


def test_mlp_biases_come_back(tmp_path):
    model = tiny_model(mlp_bias=True)

    assert read(write_gguf(tmp_path / "tiny.gguf", model)).config == model.config


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16"), ("Q4_1", "bfloat16")]
)
def test_narrow_tensors_are_expanded_to_what_they_store(kind: str, dtype: str, tmp_path):
    quantisation = gguf.GGMLQuantizationType[kind]
    model = tiny_model(hidden_size=64, head_dim=16, intermediate_size=96)

    back = read(write_gguf(tmp_path / "tiny.gguf", model, quantisation))

    assert back.config == replace(model.config, dtype=dtype)
    expected = hf_state(model)
    for name, tensor in hf_state(back).items():
        if tensor.dim() == 2:  # rows are quantised one by one: their order does not matter
            stored = gguf.dequantize(gguf.quantize(expected[name].numpy(), quantisation), quantisation)
            assert torch.equal(tensor, torch.from_numpy(stored)), name


@pytest.mark.parametrize(
    ("metadata", "rope"),
    [
        ({"type": "none"}, RopeConfig(rope_theta=10000.0)),
        ({"type": "linear", "factor": 2.5}, RopeConfig("linear", 10000.0, 2.5)),
        ({"type": "yarn", "factor": 4.0, "original_context_length": 64}, RopeConfig("yarn", 10000.0, 4.0, 64)),
    ],
)
def test_rope_scaling_is_read_from_the_metadata(metadata: dict[str, Any], rope: RopeConfig, tmp_path):
    scaling = {f"{{arch}}.rope.scaling.{key}": value for key, value in metadata.items()}

    assert read(write_gguf(tmp_path / "t.gguf", tiny_model(), metadata=scaling)).config.rope == rope


def test_numbers_that_repeat_others_are_accepted(tmp_path):
    metadata = {"{arch}.vocab_size": 131, "{arch}.rope.dimension_count": 10}

    config, generation = gguf_config(open_gguf(write_gguf(tmp_path / "t.gguf", tiny_model(), metadata=metadata)))

    assert (config["vocab_size"], config["head_dim"], config["rms_norm_eps"]) == (131, 10, 1e-5)
    assert generation == {"eos_token_id": [2, 7]}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("{arch}.expert_count", 8),
        ("{arch}.rope.dimension_count", 6),
        ("{arch}.attention.sliding_window", 64),
        ("{arch}.rope.scaling.yarn_beta_fast", 16.0),
    ],
)
def test_metadata_that_is_not_implemented_is_refused_by_name(key: str, value: Any, tmp_path):
    path = write_gguf(tmp_path / "t.gguf", tiny_model(), metadata={key: value})

    with pytest.raises(BadGGUF, match=f"{key.removeprefix('{arch}.')}.*{value}"):
        read(path)


def test_an_unknown_tensor_is_refused_by_name(tmp_path):
    path = write_gguf(tmp_path / "t.gguf", tiny_model(), extra_tensor="rope_freqs.weight")

    with pytest.raises(BadGGUF, match=r"does not know the tensor rope_freqs\.weight"):
        read(path)


def test_an_unknown_architecture_is_refused_by_name(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()

    with pytest.raises(BadGGUF, match="'gemma3' model: minisgl runs llama or qwen3"):
        read(tmp_path / "t.gguf")


@pytest.mark.parametrize("keep", [0, 3, 200, 60_000])
def test_a_truncated_file_is_called_unreadable(tmp_path, keep: int):
    path = write_gguf(tmp_path / "t.gguf", tiny_model())
    path.write_bytes(path.read_bytes()[:keep])

    with pytest.raises(BadGGUF, match=r"t\.gguf is not a readable GGUF file .*: fetch it again"):
        read(path)


def test_a_file_without_a_tokenizer_is_refused_with_the_way_out(tmp_path):
    path = write_gguf(tmp_path / "t.gguf", tiny_model())

    with pytest.raises(BadGGUF, match=r"t\.gguf: no tokenizer to be read .* use the model's Hugging Face folder"):
        convert(path, tmp_path / "new")
