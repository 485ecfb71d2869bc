"""From a .gguf file to what Hugging Face's tools read: a whole model folder, or its tokenizer alone.

Knows nothing of downloads, nor of what minisgl does with the folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from tqdm import tqdm

from minisgl.models.gguf import gguf_config, gguf_weights, open_gguf


def convert(gguf: Path, folder: Path) -> None:
    """Write config, tokenizer and bf16 weights of a .gguf file to a new folder.

    Raises:
        Exception: OSError, or what safetensors and tokenizers make of it, if the disk is full or not writable; the
            folder is then incomplete.
    """
    from safetensors.torch import save_file

    folder.mkdir()
    config, generation_config = gguf_config(gguf)
    config["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(generation_config, indent=2))
    tensors = tqdm(gguf_weights(gguf), "convert", len(open_gguf(gguf).tensors), unit="tensor", disable=None)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in tensors}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = gguf_tokenizer(gguf)
    tokenizer.model_max_length = config["max_position_embeddings"]
    tokenizer.save_pretrained(folder)


def gguf_tokenizer(gguf: Path) -> Any:
    """The transformers tokenizer that a .gguf file holds. Takes seconds."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    pre = open_gguf(gguf).fields.get("tokenizer.ggml.pre")
    # transformers reads the words but not how text is cut before they are matched, which it would get wrong here:
    # SmolLM's takes each digit apart first, so that "\t\t5" begins with the one word "\t\t".
    if pre and pre.contents() == "smollm":
        cuts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    return tokenizer
