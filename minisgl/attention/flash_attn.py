"""Attention over pages by the flash-attn package (Dao, 2023), for comparison with our own kernels."""

import torch
from flash_attn import flash_attn_varlen_func

from minisgl.attention.in_place import InPlaceAttention


class FlashAttention(InPlaceAttention):
    """One step's attention. The package wants 32-bit tables, and pages of a multiple of 256 tokens."""

    def attend(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        """See InPlaceAttention.attend."""
        keys, values, page_table, page_size, kv_lens, query_starts = self.paged(layer)
        kv_starts = torch.nn.functional.pad(kv_lens.cumsum(0), (1, 0))
        out: torch.Tensor = flash_attn_varlen_func(
            q,
            keys.view(-1, page_size, *keys.shape[1:]),
            values.view(-1, page_size, *keys.shape[1:]),
            cu_seqlens_q=query_starts.int(),
            cu_seqlens_k=kv_starts.int(),
            max_seqlen_q=max(self.rows.query_lens),
            max_seqlen_k=max(self.rows.kv_lens),
            causal=True,
            block_table=page_table.int(),
        )
        return out
