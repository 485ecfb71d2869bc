"""Qwen3 is Llama with a norm on each query and key head before rotation (Qwen3 technical report, 2025)."""

from minisgl.models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    qk_norm = True
