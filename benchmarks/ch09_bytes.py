"""What the ranks of a decode step say to each other, and what it takes on a link. Counted and predicted, not measured.

- counts: each collective of a step, by layer: its tensor's bytes, and what a rank sends if it goes around a ring.
- predicted: a step's time by number of ranks and link: reading weights and KV, then the collectives, one after another.

The counts come from a model without memory (on the meta device) that runs one step with a rank's end of no group.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import minisgl_hub as hub
import torch

from benchmarks.record import load, save
from minisgl.core import ForwardBatch
from minisgl.distributed.comm import Comm
from minisgl.layers.embedding import SplitEmbedding
from minisgl.layers.linear import RowLinear
from minisgl.models.config import ModelConfig
from minisgl.models.llama import LlamaForCausalLM
from minisgl.models.register import build_model

SHAPES = Path(__file__).parent / "shapes"
SIZES = {"smollm2": (1, 3), "qwen3-0.6b": (1, 2, 4, 8), "llama-2-7b": (1, 2, 4, 8), "llama-2-70b": (1, 2, 4, 8)}
BATCHES = (1, 16, 256)
CONTEXT = 512  # tokens of each request
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Link:
    """What a collective costs between two ranks.

    Attributes:
        bytes_per_s: one direction of one rank, by the vendor's data sheet; none of it is lost to the protocol.
        call_s: before the first byte is through, all ranks together: an assumption, and the same for any tp.
    """

    name: str
    bytes_per_s: float
    call_s: float
    source: str


LINKS = {
    "nvlink": Link("NVLink of an H200", 450e9, 10e-6, "data sheet: 900 GB/s both ways; 10 µs a call are assumed"),
    "pcie": Link("PCIe 5 x16", 64e9, 20e-6, "specification: 64 GB/s a direction; 20 µs a call are assumed"),
}
FREE = Link("no link", float("inf"), 0.0, "a limit: what tensor parallel would bring if ranks need not talk")


@dataclass(frozen=True)
class Call:
    """A collective of one rank."""

    where: str  # the layer's name in the checkpoint, or "head"
    collective: str
    shape: tuple[int, ...]  # of the rank's own tensor
    bytes: int
    sent_bytes: float  # by this rank, around a ring


class Recorder:
    """A rank's end of a group, which notes each call. Without `inner` there is no group: shapes are right, numbers not.

    Args:
        inner: does the work; rank and size are its own then.
    """

    in_graphs = False

    def __init__(self, rank: int, size: int, inner: Comm | None = None) -> None:
        self.rank, self.size, self.inner = rank, size, inner
        self.where, self.calls = "head", list[Call]()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._note("all_reduce", x, 2 * (self.size - 1) / self.size)  # each part to a sum, and each sum to all
        return self.inner.all_reduce(x) if self.inner else x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self._note("all_gather", x, self.size - 1)  # its own, and what it passes on
        return self.inner.all_gather(x) if self.inner else torch.cat([x] * self.size, dim=-1)

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        self._note("broadcast", x, 1)
        return self.inner.broadcast(x, src) if self.inner else x

    def minimum(self, n: int) -> int:
        return self.inner.minimum(n) if self.inner else n

    def watch(self, model: LlamaForCausalLM) -> None:
        """From now on calls are noted with the layer that made them."""
        for name, module in model.named_modules():
            if isinstance(module, RowLinear | SplitEmbedding):
                module.register_forward_pre_hook(lambda *_, name=name: setattr(self, "where", name))
                module.register_forward_hook(lambda *_: setattr(self, "where", "head"))

    def _note(self, collective: str, x: torch.Tensor, times: float) -> None:
        if self.size > 1:  # one rank calls, and nothing is sent
            self.calls.append(Call(self.where, collective, tuple(x.shape), x.nbytes, times * x.nbytes))


class NoAttention:
    """In place of attention, which is each rank's own affair: the queries as they came."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, batch: ForwardBatch) -> Any:
        """See core.AttentionBackend."""
        return q


@cache
def built(config: ModelConfig, tp: int, dtype: torch.dtype) -> tuple[LlamaForCausalLM, Recorder]:
    """Rank 0's part of a model, without memory, and its end of no group."""
    comm = Recorder(0, tp)
    model = build_model(config, comm=comm).to(dtype)
    comm.watch(model)
    return model, comm


@cache
@torch.inference_mode()
def collectives(config: ModelConfig, tp: int, rows: int = 1, dtype: torch.dtype = DTYPE) -> list[Call]:
    """What rank 0 of tp calls in a step of `rows` tokens, of each of which the logits are wanted.

    With more rows there are no more calls, and as many times the bytes.
    """
    model, comm = built(config, tp, dtype)
    comm.calls = []
    ids = torch.zeros(rows, dtype=torch.int64, device="meta")
    model(ForwardBatch(ids, ids, NoAttention()))
    return comm.calls


def part(call: Call) -> str:
    """Which part of the model a call belongs to: embedding, attention, MLP or head."""
    return {"o_proj": "attention", "down_proj": "mlp", "head": "head"}.get(call.where.split(".")[-1], "embedding")


def summary(calls: list[Call]) -> dict[str, Any]:
    """Calls, tensors' bytes and bytes sent, in all and by part."""
    by_part: dict[str, Any] = {}
    for call in calls:
        count = by_part.setdefault(part(call), Counter())
        count.update({call.collective: 1, "bytes": call.bytes, "sent_bytes": call.sent_bytes})
    names = ("all_reduce", "all_gather", "bytes", "sent_bytes")
    total = {name: sum(count[name] for count in by_part.values()) for name in names}
    return total | {"calls": len(calls), "parts": {name: dict(count) for name, count in by_part.items()}}


@cache
def held(config: ModelConfig, tp: int, dtype: torch.dtype = DTYPE) -> dict[str, int]:
    """Bytes that rank 0 holds, those of the weights that a decode step reads, and of K and V a token."""
    model, _ = built(config, tp, dtype)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    looked_up = 0 if model.lm_head is None else model.model.embed_tokens.weight.nbytes  # a row a token: next to nothing
    kv = 2 * config.num_layers * model.num_kv_heads * config.head_dim * dtype.itemsize
    return {"weight_bytes": weights, "read_bytes": weights - looked_up, "kv_bytes_per_token": kv}


@cache
def predicted_parts_s(
    config: ModelConfig,
    tp: int,
    link: Link,
    batch: int = 1,
    context: int = CONTEXT,
    memory_bytes_per_s: float = 4.28e12,
    flops_per_s: float = 7.91e14,
) -> dict[str, float]:
    """Seconds of a decode step: reading weights, K and V; arithmetic beyond that; each call's start, and its bytes.

    It leaves out all that does not shrink with tp: the kernels' own start and end, and what every rank does in full
    (norms, sampling). So it is a lower bound, and farthest from the truth for small models.

    Args:
        memory_bytes_per_s, flops_per_s: what one GPU reaches in a copy and a 16-bit product; an H200's by default.
    """
    mine, calls = held(config, tp), collectives(config, tp)
    weights = mine["read_bytes"] / memory_bytes_per_s
    products = 2 * batch * mine["read_bytes"] / DTYPE.itemsize / flops_per_s
    return {
        "memory": weights + batch * context * mine["kv_bytes_per_token"] / memory_bytes_per_s,
        "arithmetic": max(0.0, products - weights),  # up to some 190 rows on an H200 it hides behind the reading
        "calls": len(calls) * link.call_s,
        "bytes": batch * sum(call.sent_bytes for call in calls) / link.bytes_per_s,
    }


def predicted_step_s(config: ModelConfig, tp: int, link: Link, batch: int = 1, context: int = CONTEXT) -> float:
    """Seconds of a decode step: see predicted_parts_s."""
    return sum(predicted_parts_s(config, tp, link, batch, context).values())


def shape(name: str) -> ModelConfig:
    """The config of one of SIZES."""
    if name == "smollm2":
        return ModelConfig.from_folder(hub.resolve(name, config_only=True))
    if name == "llama-2-70b":
        wide = {"hidden_size": 8192, "intermediate_size": 28672, "num_layers": 80, "num_heads": 64, "num_kv_heads": 8}
        return replace(shape("llama-2-7b"), **wide)  # type: ignore[arg-type]
    return ModelConfig.from_folder(SHAPES / name)


def of_shape(config: ModelConfig, tp: int, machine: tuple[float, float]) -> dict[str, Any]:
    """Of a model on tp ranks: what one holds, what it says for a row of a step, predictions by link and batch."""
    predicted: dict[str, Any] = {}
    for name, link in {"free": FREE, **LINKS}.items():
        for batch in BATCHES:
            parts = predicted_parts_s(config, tp, link, batch, CONTEXT, *machine)
            alone = sum(predicted_parts_s(config, 1, link, batch, CONTEXT, *machine).values())
            ms = {f"{part}_ms": 1000 * seconds for part, seconds in parts.items()}
            step_ms = sum(ms.values())
            predicted.setdefault(name, {})[str(batch)] = ms | {"step_ms": step_ms, "speed_up": 1000 * alone / step_ms}
    return held(config, tp) | {"row": summary(collectives(config, tp)), "predicted": predicted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="ch09_bytes", help="of the result file (default: %(default)s)")
    args = parser.parse_args()
    limits = load("peers_h200")["data"]["machine"]
    machine = limits["copy_bytes_per_s"], limits["matmul_flops_per_s"]
    data = {
        "dtype": str(DTYPE).removeprefix("torch."),
        "context": CONTEXT,
        "batches": BATCHES,
        "memory_bytes_per_s": machine[0],
        "flops_per_s": machine[1],
        "links": {name: asdict(link) for name, link in LINKS.items()},
        "shapes": {  # a page's path to a number is cut at dots
            name.replace(".", "_"): {str(tp): of_shape(shape(name), tp, machine) for tp in sizes}
            for name, sizes in SIZES.items()
        },
    }
    print(save(args.name, data))


if __name__ == "__main__":
    main()
