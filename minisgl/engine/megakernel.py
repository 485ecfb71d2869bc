"""A decode step of few requests as one kernel: which models and devices it is for, and how it gets their weights."""

from __future__ import annotations

from typing import Any

import torch
from minisgl_kernels import why_not

from minisgl.engine.rows import StepInputs
from minisgl.kvcache.mha_pool import MHAPool
from minisgl.models.llama import LlamaForCausalLM


def why_no_megakernel(model: LlamaForCausalLM) -> str:
    """Why a model's steps do not run as one kernel; empty if they do."""
    if reason := why_not("cuda", model.device, model.dtype):
        return reason
    from minisgl_kernels.cuda import mega

    config = model.config
    if config.attention_bias or config.mlp_bias:
        return "the megakernel adds no biases"
    heads = config.num_heads, config.num_kv_heads, config.head_dim
    sizes = config.hidden_size, config.intermediate_size, *heads, config.vocab_size
    return mega.why_unavailable(model.device, model.dtype, *sizes)


class Megakernel:
    """The logits of up to `most_rows` places, as `model(batch)` computes them with many kernels. See cuda/mega.cu."""

    def __init__(self, model: LlamaForCausalLM, pool: MHAPool) -> None:
        from minisgl_kernels.cuda import mega

        decoder, self.most_rows = model.model, mega.MOST_ROWS
        layers = [_weights(layer) for layer in decoder.layers]
        table = decoder.embed_tokens.weight
        head = table if model.lm_head is None else model.lm_head.weight
        self._rotary, self._dtype = decoder.rotary, model.dtype
        self._step = mega.DecodeStep(layers, table, decoder.norm.weight, head, pool.kv, model.config.rms_norm_eps)

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        """Logits [B, vocab] of a step of one token for each place; its K and V go to the pool."""
        angles = self._rotary(inputs.positions, self._dtype)
        return self._step(inputs.input_ids, inputs.positions, inputs.page_table, *angles)


def _weights(layer: Any) -> Any:
    from minisgl_kernels.cuda.mega import LayerWeights

    attention, mlp = layer.self_attn, layer.mlp
    return LayerWeights(
        input_norm=layer.input_layernorm.weight,
        qkv=attention.qkv_proj.weight,
        q_norm=attention.q_norm and attention.q_norm.weight,
        k_norm=attention.k_norm and attention.k_norm.weight,
        o=attention.o_proj.weight,
        post_norm=layer.post_attention_layernorm.weight,
        gate_up=mlp.gate_up_proj.weight,
        down=mlp.down_proj.weight,
    )
