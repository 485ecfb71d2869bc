"""What one layer moves at each op, and in how many kernels: torch's ops beside the fused ones. Counted, not measured.

The engine's own layer runs on torch's meta device, where tensors have a shape and no numbers, so the counts need no
GPU and are the same everywhere. Each operation of torch that is no view is a kernel that reads its inputs and writes
its outputs once, and so is each fused op. The result also holds the text of the generator's worked example.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from minisgl_kernels import reference
from minisgl_kernels.fuser_source import generate
from minisgl_kernels.fuser_steps import Activation, Matmul, Norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.record import save
from minisgl.kvcache.mha_pool import MHAPool
from minisgl.layers.attention import Attention, FusedAttention
from minisgl.models.config import ModelConfig
from minisgl.models.llama import DecoderLayer

MODEL = Path(__file__).parent / "shapes/qwen3-0.6b"
DTYPE, PAGE = torch.bfloat16, 16
STEPS = {1: 1024, 256: 256 * 1024, 16384: 16384}  # tokens of a step, and those whose K and V its attention reads
PRODUCTS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


class Count:
    """Kernels and bytes, by the op that they belong to, in order."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._op, self._fresh = "", True

    @contextmanager
    def of(self, op: str) -> Iterator[None]:
        """What runs in this block belongs to one call of `op`."""
        before, self._op, self._fresh = self._op, op, True
        yield
        self._op, self._fresh = before, True

    def add(self, read: int, written: int, kernel: str = "") -> None:
        """One kernel; outside of every op it stands under its own name."""
        if self._fresh or not self._op:
            self.rows.append({"op": self._op or kernel, "kernels": 0, "read": 0, "written": 0})
        self._fresh = False
        row = self.rows[-1]
        row["kernels"], row["read"], row["written"] = row["kernels"] + 1, row["read"] + read, row["written"] + written


class Watch(TorchDispatchMode):
    """Counts what torch runs."""

    def __init__(self, count: Count) -> None:
        super().__init__()
        self.count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        writes = any(r.alias_info and r.alias_info.is_write for r in func._schema.returns)
        is_view = not writes and not storages(out).isdisjoint(storages(args))
        if is_view or name.startswith(("empty", "new_empty")):
            return out
        if name == "index_copy_":  # reads and writes as many rows as it is given, not the whole pool
            self.count.add(size(args[2], args[3]), size(args[3]), name)
        else:
            self.count.add(size(args, kwargs), size(out), name)
        return out


class TorchOps:
    """minisgl_kernels.reference, counted by op; products by the name of their weight."""

    def __init__(self, count: Count, weights: dict[int, str]) -> None:
        self.count, self.weights = count, weights

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            op = self.weights[id(args[1])] if name == "linear" else name
            with self.count.of(op):
                return getattr(reference, name)(*args)

        return call

    def linear_silu_mul(self, *product: Any) -> Any:
        """Counted as its two ops, which chapter 7 tells apart."""
        return self.silu_and_mul(self.linear(*product))


class FusedOps(TorchOps):
    """The same with the ops that chapter 7 fuses: each one kernel."""

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
        with self.count.of("add_rms_norm"):
            self.count.add(size(x, residual, weight), 2 * size(x))
        return torch.empty_like(x), torch.empty_like(x)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        with self.count.of("silu_and_mul"):
            self.count.add(size(gate_up), size(gate_up) // 2)
        return gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)

    def qk_norm_rope_store(
        self, qkv: torch.Tensor, q_weight: Any, k_weight: Any, eps: float, cos: Any, sin: Any, keys: Any, *rest: Any
    ) -> torch.Tensor:
        with self.count.of("qk_norm_rope_store"):
            self.count.add(size(qkv, q_weight, k_weight, cos, sin, rest[-1]), size(qkv))
        return qkv.new_empty(len(qkv), qkv.shape[1] - 2 * keys.shape[1], qkv.shape[2])


class Backend:
    """Attention in place, over meta tensors: one kernel that reads q and all K and V, and writes its output."""

    def __init__(self, count: Count, pool: MHAPool, tokens: int, kv_tokens: int) -> None:
        self.count, self.pool, self.kv_tokens = count, pool, kv_tokens
        self.slots = torch.empty(tokens, dtype=torch.int64, device="meta")

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, batch: Any) -> torch.Tensor:
        with self.count.of("store"):
            self.pool.store(layer, k, v, self.slots)
        return self.attend(q, layer)

    def destination(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return (*self.pool.layer(layer), self.slots)

    def attend(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        token = 2 * self.pool.kv.shape[-2:].numel() * self.pool.kv.element_size()
        with self.count.of("attention"):
            self.count.add(size(q) + self.kv_tokens * token, size(q))
        return torch.empty_like(q, memory_format=torch.contiguous_format)


def storages(*values: Any) -> set[int]:
    """What memory the tensors in a nest of values lie in. A copy that torch found needless is a view as well."""
    return {v.untyped_storage()._cdata for v in tree_leaves(values) if isinstance(v, torch.Tensor)}


def size(*values: Any) -> int:
    """Bytes of all tensors in a nest of values; what is broadcast counts once."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    dims = [[n for n, stride in zip(t.shape, t.stride(), strict=True) if stride] for t in tensors]
    return sum(torch.Size(n).numel() * t.element_size() for n, t in zip(dims, tensors, strict=True))


@torch.inference_mode()
def layer(config: ModelConfig, tokens: int, kv_tokens: int, fused: bool, qk_norm: bool = True) -> list[dict[str, Any]]:
    """What a layer in the middle of the model does in a step of this many tokens: its ops with kernels and bytes."""
    count = Count()
    with torch.device("meta"):
        attention: type[Attention] = FusedAttention if fused else Attention
        module = DecoderLayer(config, 0, qk_norm, attention).to(DTYPE)
        x, residual = torch.empty(2, tokens, config.hidden_size, dtype=DTYPE).unbind()
        rope = torch.empty(2, tokens, config.head_dim // 2, dtype=DTYPE).unbind()
    pages = tokens // PAGE + 2
    pool = MHAPool(1, pages, PAGE, config.num_kv_heads, config.head_dim, DTYPE, torch.device("meta"))
    weights = {
        id(part.weight): name.rpartition(".")[2] for name, part in module.named_modules() if name.endswith("proj")
    }
    ops = (FusedOps if fused else TorchOps)(count, weights)
    for part in module.modules():
        if hasattr(part, "ops"):
            part.ops = ops
    with Watch(count):
        batch: Any = SimpleNamespace(attention=Backend(count, pool, tokens, kv_tokens))
        module(x, residual, rope, batch)
    return count.rows


def totals(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of a layer, and of what stands between its products and its attention, which is what can be fused."""
    between = [row for row in rows if row["op"] not in (*PRODUCTS, "attention")]
    return {
        "kernels": sum(row["kernels"] for row in rows),
        "bytes": sum(row["read"] + row["written"] for row in rows),
        "kernels_between": sum(row["kernels"] for row in between),
        "bytes_between": sum(row["read"] + row["written"] for row in between),
    }


def generated() -> str:
    """The kernel of norm, product and activation."""
    return generate([Norm(1e-6), Matmul(), Activation("silu")])


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    config = ModelConfig.from_folder(MODEL)
    steps = {}
    for tokens, kv_tokens in STEPS.items():
        ways = {name: layer(config, tokens, kv_tokens, name == "fused") for name in ("torch", "fused")}
        steps[str(tokens)] = {name: {"ops": rows} | totals(rows) for name, rows in ways.items()}
        for name, rows in ways.items():
            found = totals(rows)
            print(f"{tokens:6} tokens, {name:5}: {found['kernels']:3} kernels, {found['bytes'] / 1e6:8.1f} MB a layer")
    data = {"model": MODEL.name, "dtype": "bfloat16", "layers": config.num_layers, "steps": steps}
    print(save("ch07_layer", data | {"generated": generated()}))


if __name__ == "__main__":
    main()
