"""What a decoder needs to know about itself, read from a Hugging Face config.

Each field of the config is used, or known not to change results, or refused by name: one that is ignored gives wrong
answers that nobody notices.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl.layers.rotary import RopeConfig

# The fields that shape each decoder, with transformers' defaults: a config may leave any of them out.
_SHARED: dict[str, Any] = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_SHARED |= {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False}
_LLAMA: dict[str, Any] = {"vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048}
_LLAMA |= {"num_key_value_heads": None, "head_dim": None}  # None: follows from num_attention_heads
_LLAMA |= {"mlp_bias": False, "eos_token_id": 2}
_QWEN3: dict[str, Any] = {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768}
_QWEN3 |= {"num_key_value_heads": 32, "head_dim": 128, "eos_token_id": None}
DEFAULTS = {"LlamaForCausalLM": _SHARED | _LLAMA, "Qwen3ForCausalLM": _SHARED | _QWEN3}
SIZES = {"vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"}
SIZES |= {"num_hidden_layers", "num_attention_heads"}
READ_APART = {"architectures", "dtype", "torch_dtype", "rope_theta", "rope_scaling", "rope_parameters"}
# Fields that any other value would make a different computation.
ONLY: dict[str, object] = {
    "hidden_act": "silu",
    "is_encoder_decoder": False,
    "partial_rotary_factor": 1.0,
    "pretraining_tp": 1,
    "rope_interleaved": False,
    "use_sliding_window": False,
}
# Fields that cannot change what inference computes.
HARMLESS = (
    {"attention_dropout", "initializer_range"}  # of training
    | {"id2label", "label2id", "problem_type"}  # of other tasks
    | {"chunk_size_feed_forward", "output_attentions", "output_hidden_states", "return_dict", "use_cache"}
    | {"bos_token_id", "pad_token_id"}  # the tokenizer's business
    | {"max_window_layers", "sliding_window"}  # read only where use_sliding_window is true
    | {"_attn_implementation_autoset", "_commit_hash", "_name_or_path", "is_llama_config", "model_type"}
    | {"transformers.js_config", "transformers_version"}
)
DTYPES = ("float32", "bfloat16", "float16")
_YARN = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
# The fields that each rope type needs, and those it may have.
ROPE_FIELDS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor"}, {"original_max_position_embeddings"}),
    "yarn": ({"factor"}, {"original_max_position_embeddings"} | _YARN),
}


class UnsupportedModel(ValueError):
    """A checkpoint that minisgl would run wrongly or not at all; the message names what stands in the way."""


class BadCheckpoint(ValueError):
    """Files that are damaged or incomplete, or whose tensors are not the model's; the message names them."""


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
        """Read a folder's config.json and, if there is one, generation_config.json; or a .gguf file's metadata."""
        if path.suffix == ".gguf":
            from minisgl.models.gguf import gguf_config  # which needs this module

            return cls.from_hf(*gguf_config(path))
        config, generation = path / "config.json", path / "generation_config.json"
        if not config.is_file():
            raise BadCheckpoint(f"{path} holds no config.json: is it the folder of a Hugging Face model?")
        return cls.from_hf(read_json(config), read_json(generation) if generation.is_file() else None)

    @classmethod
    def from_hf(cls, config: dict[str, Any], generation_config: dict[str, Any] | None = None) -> ModelConfig:
        """Read the JSON form of a transformers config; missing fields take transformers' defaults.

        Raises:
            UnsupportedModel: the architecture, a field or a value is not one that minisgl implements.
        """
        architectures = config.get("architectures") or []
        if len(architectures) != 1 or architectures[0] not in DEFAULTS:
            raise UnsupportedModel(f"the config's architectures are {architectures}: minisgl runs {_any_of(DEFAULTS)}")
        [architecture] = architectures
        _refuse_unknown(config, DEFAULTS[architecture].keys() | READ_APART | HARMLESS)
        fields = DEFAULTS[architecture] | config
        for name in SIZES:
            _require(_is_size(fields[name]), name, fields[name], "a positive whole number")
        heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
        kv_heads = heads if fields["num_key_value_heads"] is None else fields["num_key_value_heads"]
        head_dim = hidden / heads if fields["head_dim"] is None else fields["head_dim"]
        divides = _is_size(kv_heads) and heads % kv_heads == 0
        _require(divides, "num_key_value_heads", kv_heads, f"a divisor of the {heads} attention heads")
        _require(head_dim > 0 and head_dim % 2 == 0, "head_dim", head_dim, "an even number, which RoPE can pair")
        dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
        _require(dtype in DTYPES, "dtype", dtype, _any_of(DTYPES))
        eos = (generation_config or {}).get("eos_token_id")
        eos = fields["eos_token_id"] if eos is None else eos
        return cls(
            architecture=architecture,
            vocab_size=fields["vocab_size"],
            hidden_size=hidden,
            intermediate_size=fields["intermediate_size"],
            num_layers=fields["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=int(head_dim),
            rms_norm_eps=fields["rms_norm_eps"],
            max_position_embeddings=fields["max_position_embeddings"],
            tie_word_embeddings=bool(fields["tie_word_embeddings"]),
            attention_bias=bool(fields["attention_bias"]),
            mlp_bias=bool(fields.get("mlp_bias")),
            rope=_read_rope(config, fields["max_position_embeddings"]),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
            dtype=dtype,
        )


def _refuse_unknown(config: dict[str, Any], known: set[str]) -> None:
    for name, value in config.items():
        if value is None:  # null is Hugging Face's way to say absent
            continue
        if name in ONLY:
            _require(value == ONLY[name], name, value, ONLY[name])
        elif name == "layer_types":
            _require(set(value) == {"full_attention"}, name, value, "full_attention for every layer")
        else:
            _require(name in known, name, value, "absent, because it does not know what that changes")


def _read_rope(config: dict[str, Any], context: int) -> RopeConfig:
    """The rotary fields in transformers 5's form, rope_parameters, or in the older one, rope_theta and rope_scaling."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rope = {"rope_theta": config.get("rope_theta") or 10000.0} | {k: v for k, v in given.items() if v is not None}
    old_type = rope.pop("type", "default")
    rope_type = rope.pop("rope_type", old_type)
    _require(rope_type in ROPE_FIELDS, "rope_type", rope_type, _any_of(ROPE_FIELDS))
    _require(rope.pop("partial_rotary_factor", 1.0) == 1.0, "partial_rotary_factor", given, 1.0)
    needed, optional = ROPE_FIELDS[rope_type]
    for name in rope.keys() - needed - optional - {"rope_theta"}:
        _require(False, f"{name} of rope_type {rope_type}", rope[name], "absent")
    for name in needed:
        _require(name in rope, f"{name} of rope_type {rope_type}", None, "given")
    if "original_max_position_embeddings" in optional:
        rope.setdefault("original_max_position_embeddings", context)
    return RopeConfig(rope_type=rope_type, **rope)


def _require(holds: bool, field: str, value: object, expected: object) -> None:
    if not holds:
        raise UnsupportedModel(f"config field {field} is {str(value)[:80]}, but minisgl needs it to be {expected}")


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0


def _any_of(names: Iterable[str]) -> str:
    return " or ".join(names)


def read_json(path: Path) -> dict[str, Any]:
    """A model's JSON file."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadCheckpoint(f"{path} is not JSON ({error}): fetch the model again") from None
    return content
