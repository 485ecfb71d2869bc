"""The Llama decoder (Touvron et al., 2023), on which most open models are variations.

Module names follow the Hugging Face checkpoint, so that the loader needs no table of renames.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from minisgl.core import ForwardBatch
from minisgl.distributed.comm import ALONE, Comm
from minisgl.layers.attention import Attention
from minisgl.layers.embedding import Embedding, SplitEmbedding
from minisgl.layers.mlp import GatedMLP
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import Rotary
from minisgl.layers.shard import kv_heads_of
from minisgl.models.config import ModelConfig

NewNorm = Callable[[int, float], RMSNorm]  # of a size and epsilon


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), where each sum is taken by the norm that reads it next."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        qk_norm: bool,
        attention: type[Attention],
        comm: Comm = ALONE,
        norm: NewNorm = RMSNorm,
    ) -> None:
        super().__init__()
        self.input_layernorm = norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention(
            layer,
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.attention_bias,
            config.rms_norm_eps if qk_norm else None,
            comm,
        )
        self.post_attention_layernorm = norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.mlp_bias, comm)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rope: tuple[torch.Tensor, torch.Tensor],
        batch: ForwardBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take and return what is yet to be added to the residual stream, and the stream: [T, hidden] each."""
        x, residual = self.input_layernorm.add(x, residual)
        x, residual = self.post_attention_layernorm.add(self.self_attn(x, rope, batch), residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    """Embedding, layers and final norm: ids in, hidden states out."""

    def __init__(
        self,
        config: ModelConfig,
        qk_norm: bool,
        attention: type[Attention],
        comm: Comm = ALONE,
        norm: NewNorm = RMSNorm,
    ) -> None:
        super().__init__()
        embedding = Embedding if comm.size == 1 else SplitEmbedding
        self.embed_tokens = embedding(config.vocab_size, config.hidden_size, comm)
        layers = (DecoderLayer(config, i, qk_norm, attention, comm, norm) for i in range(config.num_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = norm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config.head_dim, config.rope)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        x = self.embed_tokens(batch.input_ids)  # [T, hidden]
        residual: Any = None  # the first layer has nothing to add to
        rope = self.rotary(batch.positions, x.dtype)
        for layer in self.layers:
            x, residual = layer(x, residual, rope, batch)
        if batch.output_rows is not None:  # the head is the largest matrix: spare it the rows nobody reads
            x, residual = x[batch.output_rows], residual[batch.output_rows]
        return self.norm.add(x, residual)[0]


class LlamaForCausalLM(nn.Module):
    """A decoder and the head that turns hidden states into logits."""

    qk_norm = False

    def __init__(
        self,
        config: ModelConfig,
        attention: type[Attention] = Attention,
        comm: Comm = ALONE,
        norm: NewNorm = RMSNorm,
    ) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, self.qk_norm, attention, comm, norm)
        self.lm_head = None if config.tie_word_embeddings else Embedding(config.vocab_size, config.hidden_size, comm)
        self.num_kv_heads = len(kv_heads_of(config.num_heads, config.num_kv_heads, comm))  # of this rank

    @property
    def device(self) -> torch.device:
        return self.model.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.norm.weight.dtype

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits of the batch's output rows: [R, vocab_size]."""
        hidden = self.model(batch)
        return (self.lm_head or self.model.embed_tokens).logits(hidden)
