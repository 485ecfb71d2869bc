"""From a .gguf file to a Hugging Face folder.

Knows nothing of downloads, nor of what is done with the folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from tqdm import tqdm

from minisgl_hub.gguf import BadGGUF, gguf_config, gguf_weights, open_gguf

SHARD_BYTES = 2_000_000_000  # two of these are in memory at most, however large the model is


def convert(gguf: Path, folder: Path) -> None:
    """Write config, tokenizer and weights of a .gguf file to a new folder.

    Weights become what the file's embedding is, fp32 or fp16, and bf16 if that is any other type.

    Raises:
        BadGGUF: the file is damaged, or holds what minisgl does not run.
        Exception: OSError, or what safetensors and tokenizers make of it, if the disk is full or not writable; the
            folder is then incomplete.
    """
    reader = open_gguf(gguf)
    config, generation_config = gguf_config(reader)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(generation_config, indent=2))
    pre = reader.fields.get("tokenizer.ggml.pre")
    tokenizer = _tokenizer(gguf, pre.contents() if pre else None)
    tokenizer.model_max_length = config["max_position_embeddings"]
    tokenizer.save_pretrained(folder)
    dtype = getattr(torch, config["dtype"])
    tensors = tqdm(gguf_weights(reader, config), "convert", len(reader.tensors), unit="tensor", disable=None)
    _save(((name, tensor.to(dtype)) for name, tensor in tensors), folder)


def _tokenizer(gguf: Path, pre: str | None) -> Any:
    """The transformers tokenizer that a .gguf file holds. Takes seconds."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except Exception as error:  # whatever its readers of many formats stumble over
        raise BadGGUF(f"{gguf}: no tokenizer to be read ({error!r}): use the model's Hugging Face folder") from error
    # transformers reads the words but not how text is cut before they are matched, which it would get wrong here:
    # SmolLM's takes each digit apart first, so that "\t\t5" begins with the one word "\t\t".
    if pre == "smollm":
        cuts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    return tokenizer


def _save(tensors: Iterable[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Write model.safetensors or, if the model is larger than a shard, several files and their index."""
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(_shards(tensors), 1):
        name = f"model-{number:05}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    if number == 1:
        (folder / name).rename(folder / "model.safetensors")
    else:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _shards(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if shard and sum(other.nbytes for other in shard.values()) + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard
