"""Attention over pages in Triton: flash attention for chunks of prompts, split-KV decode for everybody else."""

from typing import Any

import torch
from minisgl_kernels import triton

from minisgl.attention.in_place import InPlaceAttention


class TritonAttention(InPlaceAttention):
    """One step's attention. See torch_backend.TorchAttention, whose results it gives."""

    def attend(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        """See InPlaceAttention.attend."""
        longest = max(self.rows.query_lens)
        return triton.paged_attention(q, *self.paged(layer), q.shape[-1] ** -0.5, max_queries=longest)

    def attend_heads(
        self, heads: torch.Tensor, norms: tuple[Any, Any, float], rope: tuple[torch.Tensor, torch.Tensor], layer: int
    ) -> torch.Tensor:
        """See core.OneKernelBackend."""
        projected = (heads, *norms, *rope, *self.destination(layer))
        if self.rows.query_lens != [1] * len(heads):
            return self.attend(triton.qk_norm_rope_store(*projected), layer)
        page_table, page_size, kv_lens = self.paged(layer)[2:5]
        return triton.qkv_decode(*projected, page_table, page_size, kv_lens, heads.shape[-1] ** -0.5)
