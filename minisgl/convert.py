"""From a .gguf file to what Hugging Face's tools read: a whole model folder, or its tokenizer alone.

Knows nothing of downloads, nor of what minisgl does with the folder.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from tqdm import tqdm

from minisgl.models.gguf import gguf_config, open_gguf
from minisgl.models.weight import iter_weights

# transformers reads a GGUF tokenizer's words but not how text is cut before they are matched. These are the cuts it
# would get wrong: SmolLM's takes each digit apart first, so that "\t\t5" begins with the one word "\t\t".
PRE_TOKENIZERS = {
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
}


def convert(gguf: Path, folder: Path) -> None:
    """Write config, tokenizer and bf16 weights of a .gguf file to a new folder.

    Raises:
        OSError: the disk is full, or not writable; the folder is then incomplete.
    """
    from safetensors.torch import save_file

    folder.mkdir()
    config, generation_config = gguf_config(gguf)
    config["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(generation_config, indent=2))
    weights = {}
    with tqdm(desc="convert", total=len(open_gguf(gguf).tensors), unit="tensor", disable=None) as bar:
        for name, tensor in iter_weights(gguf):
            weights[name] = tensor.to(torch.bfloat16)
            bar.update()
        bar.set_description("tokenizer")
        tokenizer = gguf_tokenizer(gguf)
    tokenizer.model_max_length = config["max_position_embeddings"]
    with _write_errors():
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save_pretrained(folder)


def gguf_tokenizer(gguf: Path) -> Any:
    """The transformers tokenizer that a .gguf file holds. Takes seconds: see cached_tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    pre = open_gguf(gguf).fields.get("tokenizer.ggml.pre")
    if pre and pre.contents() in PRE_TOKENIZERS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[pre.contents()])
    return tokenizer


def cached_tokenizer(gguf: Path, cache: Path) -> Path:
    """The folder in `cache` with the tokenizer of a .gguf file, made on the first call."""
    stat = gguf.stat()
    identity = f"{gguf.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    folder = cache / hashlib.sha256(identity.encode()).hexdigest()[:16]
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as work, _write_errors():
            made = Path(work) / "tokenizer"
            gguf_tokenizer(gguf).save_pretrained(made)
            try:
                made.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process made the same meanwhile
                    raise
    return folder


@contextmanager
def _write_errors() -> Iterator[None]:
    """safetensors and tokenizers tell of a failed write by exceptions of their own; have them be OSErrors."""
    try:
        yield
    except Exception as error:
        if "(os error" in str(error):
            raise OSError(str(error)) from error
        raise
