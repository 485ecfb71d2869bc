"""Grouped-query attention: projections, optional norms of q and k, rotation, and whatever backend attends."""

from typing import Any, cast

import torch
from minisgl_kernels import reference
from torch import nn

from minisgl.core import ForwardBatch, InPlaceBackend
from minisgl.distributed.comm import ALONE, Comm
from minisgl.layers.linear import MergedLinear, RowLinear
from minisgl.layers.norm import RMSNorm
from minisgl.layers.shard import divided, even_shard, head_shard, kv_heads_of


class Attention(nn.Module):
    """One layer's attention (grouped heads: Ainslie et al., 2023). Where K and V are kept is the backend's business.

    Args:
        layer: this layer's index, by which the backend finds its K and V.
        num_heads, num_kv_heads: the model's; the attributes of these names are the rank's.
        qk_norm_eps: with a number, q and k are normalised per head before rotation (Qwen3); None leaves them.
    """

    ops = reference

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool = False,
        qk_norm_eps: float | None = None,
        comm: Comm = ALONE,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.head_dim = divided(num_heads, "query heads", comm.size), head_dim
        kv_heads = kv_heads_of(num_heads, num_kv_heads, comm)
        self.num_kv_heads = len(kv_heads)
        q, kv = even_shard(num_heads * head_dim, comm), head_shard(kv_heads, head_dim, num_kv_heads * head_dim)
        self.qkv_proj = MergedLinear(hidden_size, {"q_proj": q, "k_proj": kv, "v_proj": kv}, bias)
        self.q_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps)
        self.k_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps)
        self.o_proj = RowLinear(num_heads * head_dim, hidden_size, bias, comm)

    def forward(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], batch: ForwardBatch) -> torch.Tensor:
        """x [T, hidden], rope the batch's cosines and sines [T, head_dim / 2]; returns [T, hidden]."""
        heads = self.qkv_proj(x).view(len(x), -1, self.head_dim)  # [T, heads + 2 · kv_heads, head_dim]
        return self.o_proj(self._attend(heads, rope, batch).flatten(1))

    def _attend(
        self, heads: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], batch: ForwardBatch
    ) -> torch.Tensor:  # [T, heads, head_dim]
        qk, v = torch.split(heads, [self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat([self.q_norm(qk[:, : self.num_heads]), self.k_norm(qk[:, self.num_heads :])], dim=1)
        q, k = torch.split(self.ops.apply_rope(qk, *rope), [self.num_heads, self.num_kv_heads], dim=1)
        return batch.attention.forward(q, k, v, self.layer, batch)


class FusedAttention(Attention):
    """The same, with norms, rotation and the store of K and V in one op; the backend must read K and V in place."""

    def _attend(
        self, heads: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], batch: ForwardBatch
    ) -> torch.Tensor:
        backend = cast(InPlaceBackend, batch.attention)
        norms: tuple[Any, Any, float] = (None, None, 0.0)
        if self.q_norm is not None and self.k_norm is not None:
            norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        q = self.ops.qk_norm_rope_store(heads, *norms, *rope, *backend.destination(self.layer))
        return backend.attend(q, self.layer)
