"""Reads a .gguf file as if it were a Hugging Face folder: its metadata as a config, its tensors under HF names.

Quantised tensors are expanded to fp32 one by one. Knows nothing of what is made of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Metadata that shapes a decoder, and the config field it becomes.
FIELDS = {"block_count": "num_hidden_layers", "context_length": "max_position_embeddings"}
FIELDS |= {"embedding_length": "hidden_size", "feed_forward_length": "intermediate_size"}
FIELDS |= {"attention.head_count": "num_attention_heads", "attention.layer_norm_rms_epsilon": "rms_norm_eps"}
OPTIONAL_FIELDS = {"attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim"}
OPTIONAL_FIELDS |= {"rope.freq_base": "rope_theta"}
ROPE_SCALING = {"type": "rope_type", "factor": "factor", "original_context_length": "original_max_position_embeddings"}
SAME_AS_HEAD_DIM = ("attention.value_length", "rope.dimension_count")
VOCABULARY = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges", "tokenizer.ggml.scores")
DTYPES = {"F32": "float32", "F16": "float16"}  # anything narrower is expanded to bfloat16
# Tensors, and the module whose weight or bias each is.
TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
TENSORS |= {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
TENSORS |= {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
TENSORS |= {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "attn_output": "self_attn.o_proj"}
TENSORS |= {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}


class BadGGUF(ValueError):
    """A file that is damaged, or holds what minisgl does not run; the message names what stands in the way."""


def open_gguf(path: Path) -> gguf.GGUFReader:
    """The file, mapped into memory. Takes seconds, for its vocabulary.

    Raises:
        BadGGUF: it is damaged.
    """
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError) as error:
        raise BadGGUF(f"{path} is not a readable GGUF file ({error}): fetch it again") from None


def gguf_config(reader: gguf.GGUFReader) -> tuple[dict[str, Any], dict[str, Any]]:
    """The file's config and generation config, in Hugging Face's JSON form.

    Raises:
        BadGGUF: it is damaged, or has an architecture, field or tensor that minisgl does not implement.
    """
    path = reader.data.filename
    meta = {name: _value(field) for name, field in reader.fields.items() if not name.startswith(VOCABULARY)}
    architecture = meta.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise BadGGUF(f"{path} holds a {architecture!r} model: minisgl runs {' or '.join(ARCHITECTURES)}")
    tensors = {_hf_name(tensor.name): tensor for tensor in reader.tensors}
    if "model.embed_tokens.weight" not in tensors:
        raise BadGGUF(f"{path} holds no token_embd.weight: is it one part of a split file? Join the parts first")

    shape = {k.removeprefix(f"{architecture}."): v for k, v in meta.items() if k.startswith(f"{architecture}.")}
    if missing := FIELDS.keys() - shape:
        raise BadGGUF(f"{path} lacks the metadata {', '.join(sorted(missing))} of {architecture}")
    config: dict[str, Any] = {"architectures": [ARCHITECTURES[architecture]], "model_type": architecture}
    config |= {field: shape.pop(key, None) for key, field in (FIELDS | OPTIONAL_FIELDS).items()}
    config["head_dim"] = config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]
    config["vocab_size"] = int(tensors["model.embed_tokens.weight"].shape[1])
    scaling = {field: shape.pop(f"rope.scaling.{key}", None) for key, field in ROPE_SCALING.items()}
    if scaling["rope_type"] not in (None, "none"):
        config["rope_scaling"] = scaling
    implied = {"vocab_size": config["vocab_size"]} | dict.fromkeys(SAME_AS_HEAD_DIM, config["head_dim"])
    if refused := {key: value for key, value in shape.items() if value != implied.get(key)}:
        raise BadGGUF(f"{path}: minisgl does not implement these fields of {architecture}: {refused}")

    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in tensors
    if "model.layers.0.mlp.up_proj.bias" in tensors:  # Qwen3 has no such field
        config["mlp_bias"] = True
    config["dtype"] = DTYPES.get(tensors["model.embed_tokens.weight"].tensor_type.name, "bfloat16")
    ids = {kind: meta.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "padding", "eos", "eot", "eom")}
    config |= {"bos_token_id": ids["bos"], "pad_token_id": ids["padding"], "eos_token_id": ids["eos"]}
    return config, {"eos_token_id": sorted({ids[kind] for kind in ("eos", "eot", "eom")} - {None})}


def gguf_weights(reader: gguf.GGUFReader, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, fp32 tensor), one at a time; `config` is the file's own."""
    rows = {"attn_q": config["num_attention_heads"]}
    rows["attn_k"] = config["num_key_value_heads"] or rows["attn_q"]
    for stored in reader.tensors:
        tensor = torch.from_numpy(np.require(gguf.dequantize(stored.data, stored.tensor_type), requirements="W"))
        kind = stored.name.split(".")[-2]
        if config["model_type"] == "llama" and kind in rows:
            tensor = _unpermute(tensor, rows[kind])
        yield _hf_name(stored.name), tensor


def _unpermute(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """From llama.cpp's order of Llama's Q and K rows, in which RoPE's pairs are neighbours, back to halves."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _hf_name(name: str) -> str:
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if not found or found[2] not in TENSORS:
        raise BadGGUF(f"minisgl does not know the tensor {name}: use the model's Hugging Face folder")
    layer = "" if found[1] is None else f"model.layers.{found[1]}."
    return f"{layer}{TENSORS[found[2]]}.{found[3]}"


def _value(field: gguf.ReaderField) -> Any:
    """A field's content; floats, which are 32-bit there, as they were written: 1e-05 and not 9.999999747378752e-06."""
    value = field.contents()
    return float(str(np.float32(value))) if isinstance(value, float) else value
