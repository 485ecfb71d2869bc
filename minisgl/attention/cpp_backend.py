"""Attention over pages in C++, for a CPU: K and V are read where they lie, and no sequence is padded."""

import torch
from minisgl_kernels import cpu

from minisgl.core import ForwardBatch, PagedRows, WorkCounts
from minisgl.kvcache.mha_pool import MHAPool


class CppAttention:
    """One step's attention. See torch_backend.TorchAttention, whose results it gives."""

    def __init__(self, pool: MHAPool, rows: PagedRows, work: WorkCounts | None = None) -> None:
        self.pool, self.rows, self.work = pool, rows, work or WorkCounts()
        self.kv_lens = torch.tensor(rows.kv_lens)
        self.query_starts = torch.tensor([0, *rows.query_lens]).cumsum(0)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, batch: ForwardBatch
    ) -> torch.Tensor:
        """Store, then attend over the pages. See core.AttentionBackend."""
        self.pool.store(layer, k, v, self.rows.slots)
        self.work.kv_bytes_written += k.nbytes + v.nbytes
        self.work.kv_bytes_read += sum(self.rows.kv_lens) * (k[0].nbytes + v[0].nbytes)
        paged = (*self.pool.layer(layer), self.rows.page_table, self.pool.page_size)
        return cpu.paged_attention(q, *paged, self.kv_lens, self.query_starts, q.shape[-1] ** -0.5)
