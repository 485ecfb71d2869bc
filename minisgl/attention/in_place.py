"""What backends share that read K and V in the pool, page by page, without copying them together first."""

import torch

from minisgl.core import ForwardBatch, PagedRows, WorkCounts
from minisgl.kvcache.mha_pool import MHAPool


class InPlaceAttention:
    """One step's attention over pages. A backend adds `attend`. Arguments as of torch_backend.TorchAttention."""

    takes_chunks = True  # in a graph

    def __init__(self, pool: MHAPool, rows: PagedRows, work: WorkCounts | None = None) -> None:
        self.pool, self.rows, self.work = pool, rows, work or WorkCounts()
        token_bytes = pool.kv.element_size() * pool.kv.shape[-2:].numel() * 2  # K and V of one token in one layer
        self._read_bytes, self._written_bytes = sum(rows.kv_lens) * token_bytes, len(rows.slots) * token_bytes

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, batch: ForwardBatch
    ) -> torch.Tensor:
        """Store, then attend over the pages. See core.AttentionBackend."""
        self.pool.store(layer, k, v, self.rows.slots)
        self.work.kv_bytes_written += self._written_bytes
        return self.attend(q, layer)

    def destination(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See core.InPlaceBackend."""
        self.work.kv_bytes_written += self._written_bytes
        return (*self.pool.layer(layer), self.rows.slots)

    def attend(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        """See core.InPlaceBackend."""
        raise NotImplementedError

    def paged(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor, torch.Tensor]:
        """The arguments of a paged attention op between q and the scale."""
        self.work.kv_bytes_read += self._read_bytes
        rows = self.rows
        return (*self.pool.layer(layer), rows.page_table, self.pool.page_size, rows.device_kv_lens, rows.query_starts)
