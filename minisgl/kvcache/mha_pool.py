"""The KV pool: one tensor for the keys and values of all requests, given out by the page.

Knows page numbers and slots, not who holds them; see `minisgl.kvcache.pages` for that.
"""

import torch


class MHAPool:
    """Keys and values of multi-head attention, by layer, page and place in the page.

    Args:
        num_pages: the dummy page 0 included.
        page_size: tokens in a page; as many as the context holds make each page a contiguous region.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self.kv = torch.empty(num_layers, 2, num_pages, page_size, num_kv_heads, head_dim, dtype=dtype, device=device)
        self.kv[:, :, 0] = 0  # what padding reads must be finite

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All K and all V of a layer by slot: views [num_pages · page_size, kv_heads, head_dim]."""
        keys, values = self.kv[layer].flatten(1, 2)
        return keys, values

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Write k and v [T, kv_heads, head_dim] of T tokens into these slots [T] int64."""
        keys, values = self.layer(layer)
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)


def slots_of(page_table: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """Where tokens lie in the pool: the slot of a token is its page's first slot plus its place in the page.

    Args:
        page_table: [B, P] int64, the pages of B sequences in the order of their tokens.
        positions: [B, S] int64, of tokens in each sequence.

    Returns:
        [B, S] int64.
    """
    return page_table.gather(1, positions // page_size) * page_size + positions % page_size


def pages_in(num_bytes: int, page_bytes: int, most: int) -> int:
    """How many pages fit into num_bytes, the dummy included, but never more than `most` could ever be used.

    Raises:
        ValueError: not even one page and the dummy fit.
    """
    pages = min(num_bytes // page_bytes, most)
    if pages < 2:
        raise ValueError(
            f"{num_bytes / 1e6:,.0f} MB are free for K and V, and a page takes {page_bytes / 1e6:,.1f} MB: "
            "lower --page-size, raise --memory-fraction or choose a smaller model"
        )
    return pages
