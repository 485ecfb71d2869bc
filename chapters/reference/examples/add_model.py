"""A model of your own: Qwen2, which is Llama with a bias on q, k and v.

    python chapters/reference/examples/add_model.py FOLDER "Once upon a time"

FOLDER is a checkpoint of a Qwen2 or Qwen2.5 model in Hugging Face's form.
"""

from __future__ import annotations

import sys
from typing import Any

from minisgl import LLM, EngineConfig
from minisgl.models.config import DEFAULTS, ModelConfig
from minisgl.models.llama import LlamaForCausalLM
from minisgl.models.register import MODELS

NAME = "Qwen2ForCausalLM"  # as the checkpoint's config.json has it under "architectures"


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Llama's attention_bias puts a bias on four projections; Qwen2 has it on three of them."""

    def __init__(self, config: ModelConfig, *parts: Any) -> None:
        super().__init__(config, *parts)
        for layer in self.model.layers:
            layer.self_attn.o_proj.bias = None


def register() -> None:
    """Let the engine build this class for checkpoints of that name."""
    MODELS[NAME] = Qwen2ForCausalLM
    # The fields of its config.json that shape it, and their defaults; any field beyond these is refused.
    DEFAULTS[NAME] = DEFAULTS["Qwen3ForCausalLM"] | {"head_dim": None, "attention_bias": True}


if __name__ == "__main__":
    register()
    with LLM(EngineConfig(model=sys.argv[1])) as llm:
        print(llm.generate(sys.argv[2])[0].text)
