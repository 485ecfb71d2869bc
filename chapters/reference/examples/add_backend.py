"""An attention backend of your own: torch's fused attention, one sequence after the other.

python chapters/reference/examples/add_backend.py "Once upon a time"
"""

from __future__ import annotations

import sys

import torch
from torch.nn.functional import scaled_dot_product_attention

from minisgl import LLM, EngineConfig
from minisgl.attention import BACKENDS
from minisgl.attention.in_place import InPlaceAttention
from minisgl.kvcache.mha_pool import slots_of


class SdpaAttention(InPlaceAttention):
    """One step's attention. The base class stores K and V, and counts the bytes."""

    def attend(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        """Attend with q [T, heads, head_dim], the new tokens of all sequences behind one another."""
        keys, values, page_table, page_size, _, _ = self.paged(layer)  # [slots, kv_heads, head_dim] each
        out, first = torch.empty_like(q), 0
        for i, (new, total) in enumerate(zip(self.rows.query_lens, self.rows.kv_lens, strict=True)):
            places = torch.arange(total, device=q.device)
            [slots] = slots_of(page_table[i : i + 1], places.unsqueeze(0), page_size)  # [total]
            seen = places <= places[total - new :, None]  # [new, total]: a token sees itself and what precedes it
            rows = slice(first, first + new)
            one = (t.transpose(0, 1).unsqueeze(0) for t in (q[rows], keys[slots], values[slots]))  # [1, heads, …]
            [heads] = scaled_dot_product_attention(*one, attn_mask=seen, enable_gqa=True)
            out[rows] = heads.transpose(0, 1)
            first += new
        return out


def register() -> None:
    """Let `attention="sdpa"` choose this class."""
    BACKENDS["sdpa"] = f"{__name__}:SdpaAttention"


if __name__ == "__main__":
    register()
    with LLM(EngineConfig(attention="sdpa")) as llm:
        print(llm.generate(sys.argv[1])[0].text)
