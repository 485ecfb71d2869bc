"""What a decoder needs to know about itself, read from a Hugging Face config."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl.layers.rotary import RopeConfig


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
