"""Attention over pages in Triton: flash attention for chunks of prompts, split-KV decode for everybody else."""

import torch
from minisgl_kernels import triton

from minisgl.attention.in_place import InPlaceAttention


class TritonAttention(InPlaceAttention):
    """One step's attention. See torch_backend.TorchAttention, whose results it gives."""

    def attend(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        """See InPlaceAttention.attend."""
        longest = max(self.rows.query_lens)
        return triton.paged_attention(q, *self.paged(layer), q.shape[-1] ** -0.5, max_queries=longest)
