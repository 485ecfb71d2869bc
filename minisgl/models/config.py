"""What a decoder needs to know about itself, read from a Hugging Face config.

Each field of the config is used, or known not to change results, or refused by name: one that is ignored gives wrong
answers that nobody notices.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl.layers.rotary import RopeConfig
from minisgl.models import BadCheckpoint, UnsupportedModel

# The fields that shape each decoder, with transformers' defaults: a config may leave any of them out.
_SHARED: dict[str, Any] = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_SHARED |= {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False}
_LLAMA: dict[str, Any] = {"vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048}
_LLAMA |= {"num_key_value_heads": None, "head_dim": None, "mlp_bias": False, "eos_token_id": 2}
_QWEN3: dict[str, Any] = {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768}
_QWEN3 |= {"num_key_value_heads": 32, "head_dim": 128, "eos_token_id": None}
DEFAULTS = {"LlamaForCausalLM": _SHARED | _LLAMA, "Qwen3ForCausalLM": _SHARED | _QWEN3}
NULLABLE = {"num_key_value_heads", "head_dim", "eos_token_id"}  # null is a value here, and absent elsewhere
SIZES = {"vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"}
SIZES |= {"num_hidden_layers", "num_attention_heads", "num_key_value_heads"}
OURS = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads"}
READ_APART = {"architectures", "dtype", "torch_dtype", "rope_theta", "rope_scaling", "rope_parameters"}
# Fields that any other value would make a different computation; layer_types has a value for each layer.
ONLY: dict[str, object] = {"hidden_act": "silu", "layer_types": "full_attention", "partial_rotary_factor": 1.0}
ONLY |= {"pretraining_tp": 1, "is_encoder_decoder": False, "rope_interleaved": False, "use_sliding_window": False}
# Fields that cannot change what inference computes: of training, of other tasks, of the tokenizer, of the file and the
# Python object, and of sliding windows, which are read only where use_sliding_window is true.
HARMLESS = {"attention_dropout", "initializer_range", "id2label", "label2id", "problem_type", "transformers_version"}
HARMLESS |= {"chunk_size_feed_forward", "output_attentions", "output_hidden_states", "return_dict", "use_cache"}
HARMLESS |= {"bos_token_id", "pad_token_id", "max_window_layers", "sliding_window", "model_type", "is_llama_config"}
HARMLESS |= {"_attn_implementation_autoset", "_commit_hash", "_name_or_path", "transformers.js_config"}
DTYPES = ("float32", "bfloat16", "float16")
# The fields that each rope type needs, and those it may have.
_YARN = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
ROPE_FIELDS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor"}, {"original_max_position_embeddings"}),
    "yarn": ({"factor"}, {"original_max_position_embeddings"} | _YARN),
}


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape. Names follow Hugging Face where it has one."""

    architecture: str  # key of models.register.MODELS
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int  # the context length in tokens
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope: RopeConfig
    eos_token_ids: tuple[int, ...]
    dtype: str  # of the checkpoint, as torch names it

    @classmethod
    def from_folder(cls, path: Path) -> ModelConfig:
        """Read a folder's config.json and, if there is one, generation_config.json."""
        generation = path / "generation_config.json"
        return cls.from_hf(read_json(path / "config.json"), read_json(generation) if generation.is_file() else None)

    @classmethod
    def from_hf(cls, config: dict[str, Any], generation_config: dict[str, Any] | None = None) -> ModelConfig:
        """Read the JSON form of a transformers config; missing fields take transformers' defaults.

        Raises:
            UnsupportedModel: the architecture, a field or a value is not one that minisgl implements.
        """
        names = config.get("architectures") or []
        if len(names) != 1 or names[0] not in DEFAULTS:
            raise UnsupportedModel(f"the config's architectures are {names}: minisgl runs {' or '.join(DEFAULTS)}")
        defaults = DEFAULTS[names[0]]
        given = {name: value for name, value in config.items() if value is not None or name in NULLABLE}
        _refuse_unknown(given, defaults.keys() | READ_APART | HARMLESS)
        shape = {name: given.get(name, default) for name, default in defaults.items()}
        if shape["num_key_value_heads"] is None:
            shape["num_key_value_heads"] = shape["num_attention_heads"]
        for name in SIZES:
            _require(type(shape[name]) is int and shape[name] > 0, name, shape[name], "a positive whole number")
        heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
        _require(heads % kv_heads == 0, "num_key_value_heads", kv_heads, f"a divisor of the {heads} attention heads")
        head_dim = shape["hidden_size"] / heads if shape["head_dim"] is None else shape["head_dim"]
        _require(head_dim > 0 and head_dim % 2 == 0, "head_dim", head_dim, "an even number, which RoPE can pair")
        dtype = given.get("dtype") or given.get("torch_dtype") or "float32"
        _require(dtype in DTYPES, "dtype", dtype, " or ".join(DTYPES))
        eos_choices = [(generation_config or {}).get("eos_token_id"), shape.pop("eos_token_id")]
        eos: Any = next((ids for ids in eos_choices if ids is not None), [])
        shape |= {"head_dim": int(head_dim), "mlp_bias": bool(shape.get("mlp_bias"))}
        return cls(
            architecture=names[0],
            rope=_read_rope(given, shape["max_position_embeddings"]),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,),
            dtype=dtype,
            **{OURS.get(name, name): value for name, value in shape.items()},
        )


def _refuse_unknown(given: dict[str, Any], known: set[str]) -> None:
    for name, value in given.items():
        if name in ONLY:
            values = value if isinstance(value, list) else [value]
            _require(all(one == ONLY[name] for one in values), name, value, ONLY[name])
        else:
            _require(name in known, name, value, "absent, because it does not know what that changes")


def _read_rope(given: dict[str, Any], context: int) -> RopeConfig:
    """The rotary fields in transformers 5's form, rope_parameters, or in the older one, rope_theta and rope_scaling."""
    fields = given.get("rope_scaling") or given.get("rope_parameters") or {}
    rope: dict[str, Any] = {"rope_theta": given.get("rope_theta") or 10000.0}
    rope |= {name: value for name, value in fields.items() if value is not None}
    rope_type = rope.setdefault("rope_type", rope.pop("type", "default"))
    _require(rope_type in ROPE_FIELDS, "rope_type", rope_type, " or ".join(ROPE_FIELDS))
    _require(rope.pop("partial_rotary_factor", 1.0) == 1.0, "partial_rotary_factor", fields, 1.0)
    needed, optional = ROPE_FIELDS[rope_type]
    for name in needed ^ (rope.keys() - optional - {"rope_theta", "rope_type"}):  # lacking, or unknown
        _require(False, f"{name} of rope_type {rope_type}", rope.get(name), "given" if name in needed else "absent")
    if "original_max_position_embeddings" in optional:
        rope.setdefault("original_max_position_embeddings", context)
    return RopeConfig(**rope)


def _require(holds: bool, field: str, value: object, expected: object) -> None:
    if not holds:
        raise UnsupportedModel(f"config field {field} is {str(value)[:80]}, but minisgl needs it to be {expected}")


def read_json(path: Path) -> dict[str, Any]:
    """A model's JSON file."""
    if not path.is_file():
        raise BadCheckpoint(f"{path.parent} holds no {path.name}: is it the folder of a Hugging Face model?")
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadCheckpoint(f"{path} is not JSON ({error}): fetch the model again") from None
    return content
