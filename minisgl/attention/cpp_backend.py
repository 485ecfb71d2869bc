"""Attention over pages in C++, for a CPU: K and V are read where they lie, and no sequence is padded."""

import torch
from minisgl_kernels import cpu

from minisgl.attention.in_place import InPlaceAttention


class CppAttention(InPlaceAttention):
    """One step's attention. See torch_backend.TorchAttention, whose results it gives."""

    def attend(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        """See InPlaceAttention.attend."""
        return cpu.paged_attention(q, *self.paged(layer), q.shape[-1] ** -0.5)
