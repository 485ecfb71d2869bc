"""Attention over pages in CUDA C++ for sequences that compute one token; chunks of prompts are Triton's."""

import torch
from minisgl_kernels import cuda, triton

from minisgl.attention.in_place import InPlaceAttention


class CudaAttention(InPlaceAttention):
    """One step's attention. See torch_backend.TorchAttention, whose results it gives."""

    def attend(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        """See InPlaceAttention.attend."""
        paged, scale = self.paged(layer), q.shape[-1] ** -0.5
        chunks = max(self.rows.query_lens) > 1
        out = triton.flash_attention(q, *paged, scale) if chunks else None
        return cuda.paged_decode(q, *paged, scale, out=out)  # the rows that flash_attention left out
