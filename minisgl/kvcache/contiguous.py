"""One sequence's keys and values in one contiguous region, reserved for the longest the sequence may become.

The simplest KV cache there is. It wastes what it reserves and does not use: chapter 3 replaces it by pages.
"""

import torch

from minisgl.core import ForwardBatch, WorkCounts


class CacheFull(Exception):
    """More tokens than the region was reserved for; nothing was stored."""


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that one token's K and V take in all layers together."""
    return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize


class ContiguousCache:
    """The attention backend of chapter 2: stores each new K and V once and attends over all stored ones.

    Args:
        capacity: tokens to reserve room for.
        work: where the bytes moved are counted.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        work: WorkCounts | None = None,
    ) -> None:
        self.kv = torch.empty(num_layers, 2, capacity, num_kv_heads, head_dim, dtype=dtype, device=device)
        self.lengths = [0] * num_layers  # tokens stored, by layer: within a step the layers fill up one after another
        self.work = work or WorkCounts()

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store k and v [T, kv_heads, head_dim] behind what this layer holds.

        Returns:
            All K and all V of the layer, the new ones included: views [S, kv_heads, head_dim].

        Raises:
            CacheFull: S would exceed the capacity, which the message names.
        """
        start = self.lengths[layer]
        end = start + len(k)
        capacity = self.kv.shape[2]
        if end > capacity:
            raise CacheFull(f"{end} tokens do not fit a cache that reserves room for {capacity}")
        self.kv[layer, 0, start:end] = k
        self.kv[layer, 1, start:end] = v
        self.lengths[layer] = end
        return self.kv[layer, 0, :end], self.kv[layer, 1, :end]

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, batch: ForwardBatch
    ) -> torch.Tensor:
        """Append, then attend over everything stored. See core.AttentionBackend."""
        keys, values = self.append(layer, k, v)
        self.work.kv_bytes_written += k.nbytes + v.nbytes
        self.work.kv_bytes_read += keys.nbytes + values.nbytes
        return attend_cached(q, keys, values, q.shape[-1] ** -0.5)


def attend_cached(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend from the last T of S tokens: the causal triangle without the rows that were computed before.

    Args:
        q: [T, heads, head_dim], the queries of positions S - T … S - 1.
        keys, values: [S, kv_heads, head_dim].
        scale: what q·k is multiplied by.

    Returns:
        [T, heads, head_dim].
    """
    new, heads, head_dim = q.shape
    total, kv_heads, _ = keys.shape
    grouped = q.view(new, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("tkgd,skd->kgts", grouped, keys).float() * scale  # [kv_heads, group, T, S]
    if new > 1:  # a single query is the last position: it may see everything
        future = torch.ones(new, total, dtype=torch.bool, device=q.device).triu(diagonal=total - new + 1)
        scores = scores.masked_fill(future, float("-inf"))
    weights = scores.softmax(dim=-1).to(values.dtype)
    return torch.einsum("kgts,skd->tkgd", weights, values).reshape(new, heads, head_dim)
