"""One decode step of a tiny model on one, two and three ranks, for the player of chapter 9: what each holds and sends.

Each rank is a process with its own shards, KV heads and end of a gloo group. It reads a prompt, then one token more;
of that step each collective is noted, with the bytes of its tensor and the first number before and after.
"""

from __future__ import annotations

import argparse
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.ch09_bytes import Recorder
from benchmarks.record import save
from minisgl.core import WorkCounts
from minisgl.distributed.comm import ALONE, Comm, connect
from minisgl.kvcache.contiguous import ContiguousCache
from minisgl.layers.shard import kv_heads_of
from minisgl.models.config import ModelConfig
from minisgl.models.register import build_model
from minisgl.models.weight import random_weights
from minisgl.simple import step

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 12,
    "num_key_value_heads": 3, "head_dim": 8, "intermediate_size": 48, "vocab_size": 101, "max_position_embeddings": 64,
    "tie_word_embeddings": True, "eos_token_id": 100,
}  # fmt: skip
PROMPT, SIZES = [5, 100, 0, 42, 77, 50], (1, 2, 3)


class Notes(Recorder):
    """A rank's end of its group, which also notes the first number that it gives to a call, and that it gets."""

    def __init__(self, comm: Comm) -> None:
        super().__init__(comm.rank, comm.size, comm)
        self.values: list[dict[str, Any]] = []

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._noted(x, super().all_reduce)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._noted(x, super().all_gather)

    def _noted(self, x: torch.Tensor, call: Any) -> torch.Tensor:
        where, mine = self.where, float(x.flatten()[0])  # the call may write into x
        everyones: torch.Tensor = call(x)
        self.values.append({"where": where, "mine": round(mine, 3), "all": round(float(everyones.flatten()[0]), 3)})
        return everyones


def decode(comm: Comm, shape: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
    """What this rank holds, and what it said in the decode step behind the prompt."""
    config, notes = ModelConfig.from_hf(shape), Notes(comm)
    model = build_model(config, comm=notes)
    random_weights(model, 3, torch.device("cpu"), torch.float32, std=0.3)  # one model, of which each takes its part
    notes.watch(model)
    cache = ContiguousCache(
        config.num_layers, model.num_kv_heads, config.head_dim, len(prompt) + 1, model.dtype, model.device
    )
    with torch.inference_mode():
        read = int(step(model, prompt, 0, cache, WorkCounts()).argmax())
        notes.calls.clear()
        notes.values.clear()
        chosen = int(step(model, [read], len(prompt), cache, WorkCounts()).argmax())
    table, layer = model.model.embed_tokens, model.model.layers[0]
    [rows] = table.shards["weight"].ranges
    heads = config.num_heads // comm.size
    matrices = {"embed_tokens": table, "qkv_proj": layer.self_attn.qkv_proj, "o_proj": layer.self_attn.o_proj}
    matrices |= {"gate_up_proj": layer.mlp.gate_up_proj, "down_proj": layer.mlp.down_proj}
    sizes = [
        {"collective": c.collective, "shape": c.shape, "bytes": c.bytes, "sent": round(c.sent_bytes)}
        for c in notes.calls
    ]
    return {
        "weights": {name: list(module.weight.shape) for name, module in matrices.items()},
        "weight_bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "kv_bytes_per_token": cache.kv.nbytes // (len(prompt) + 1),
        "tokens": list(rows),
        "q_heads": [*range(comm.rank * heads, (comm.rank + 1) * heads)],
        "kv_heads": kv_heads_of(config.num_heads, config.num_kv_heads, comm),
        "calls": [value | size for value, size in zip(notes.values, sizes, strict=True)] if sizes else notes.values,
        "read": read,
        "chosen": chosen,
    }


def meet(rank: int, size: int, place: str, shape: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
    """A process's part: join the group that meets at the file, and decode."""
    torch.set_num_threads(1)
    comm = connect(torch.distributed.FileStore(place, size), rank, size, "gloo", timeout_s=60)
    found = decode(comm, shape, prompt)
    comm.minimum(0)  # a rank that leaves first would take its connections along
    return found


def run(size: int, shape: dict[str, Any] = SHAPE, prompt: list[int] = PROMPT) -> list[dict[str, Any]]:
    """Each rank's notes."""
    if size == 1:
        return [decode(ALONE, shape, prompt)]
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(size, get_context("spawn")) as pool:
        place = str(Path(folder) / "store")
        seats = [pool.submit(meet, rank, size, place, shape, prompt) for rank in range(size)]
        return [seat.result() for seat in seats]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    groups = {str(size): run(size) for size in SIZES}
    print(save("player_ranks", {name: SHAPE[name] for name in names} | {"groups": groups}))


if __name__ == "__main__":
    main()
