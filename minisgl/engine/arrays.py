"""A planned step as tensors: arrays that live as long as the engine, filled in place, sent in one copy."""

import numpy as np
import torch

from minisgl.core import Batch, PagedRows, Request


class BatchArrays:
    """Keeps every running request's page table, by row, and lays out each step's integers behind one another.

    Args:
        max_rows: requests that may run side by side.
        max_len: longest sequence in tokens.
    """

    def __init__(self, max_rows: int, max_len: int, page_size: int, device: torch.device) -> None:
        self.page_size, self.device = page_size, device
        self._tables = np.zeros((max_rows, -(-max_len // page_size)), dtype=np.int64)
        self._requests, self._rows = list[Request](), np.zeros(0, dtype=np.int64)
        self._parts, self._host = list[int](), torch.empty(0, dtype=torch.int64)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def fill(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PagedRows]:
        """Bring the page tables up to date and lay out the step.

        Returns:
            input_ids [T], positions [T] and the last row of each request [B], all int64 on the device, and where the
            sequences lie in the pool. They are views of one buffer and hold until the next call.
        """
        for request, first in batch.moved:
            if request.row >= 0:
                for i in range(first, len(request.pages)):  # often one page, for which a slice would take longer
                    self._tables[request.row, i] = request.pages[i]
        requests, num_rows, total = batch.requests, len(batch.requests), batch.total_tokens
        if requests != self._requests or not all(first for _, first in batch.moved):  # a new row comes with page 0
            self._requests, self._rows = requests, np.array([request.row for request in requests])
        rows, starts = self._rows, np.array(batch.starts)
        if total == num_rows:  # one token each: the common case need not be spread out
            ids = [request.tokens[start] for request, start in zip(requests, batch.starts, strict=True)]
            row_of, position, ends, kv_lens = rows, starts, np.arange(1, total + 1), starts + 1
        else:
            ids = [token for request, start, n in batch for token in request.tokens[start : start + n]]
            counts = np.array(batch.num_tokens)
            ends, kv_lens = counts.cumsum(), starts + counts
            row_of, position = np.repeat(rows, counts), np.arange(total) + np.repeat(kv_lens - ends, counts)

        width = -(-int(kv_lens.max()) // self.page_size)
        if self._copied:  # nothing else keeps the step before from being still on its way out of this buffer
            self._copied.synchronize()
        self._lay_out([total, total, total, num_rows, num_rows + 1, num_rows, num_rows * width])
        to_ids, to_positions, to_slots, to_last_rows, to_query_starts, to_kv_lens, to_tables = self._writable
        to_ids[:], to_positions[:], to_last_rows[:] = ids, position, ends - 1
        to_query_starts[0], to_query_starts[1:], to_kv_lens[:] = 0, ends, kv_lens
        to_slots[:] = self._tables[row_of, position // self.page_size] * self.page_size + position % self.page_size
        np.take(self._tables[:, :width], rows, axis=0, out=to_tables.reshape(num_rows, width), mode="clip")
        if self._sent is not self._host:
            self._sent[: sum(self._parts)].copy_(self._host[: sum(self._parts)], non_blocking=True)
        if self._copied:
            self._copied.record()

        input_ids, positions, slots, last_rows, query_starts, device_kv_lens, tables = self._views
        paged = PagedRows(
            slots, tables.view(num_rows, width), batch.num_tokens, kv_lens.tolist(), query_starts, device_kv_lens
        )
        return input_ids, positions, last_rows, paged

    def _lay_out(self, parts: list[int]) -> None:
        """Cut the buffers into parts of these lengths, as they mostly are already, and grow them where they must."""
        if parts == self._parts:
            return
        size, self._parts = sum(parts), parts
        if size > len(self._host):  # pinned where a GPU will read it, so that the copy need not wait
            self._host = torch.empty(2 * size, dtype=torch.int64, pin_memory=self.device.type == "cuda")
            self._sent = self._host.to(self.device)  # on a CPU the same tensor
        self._writable = [part.numpy() for part in torch.split(self._host[:size], parts)]
        self._views = torch.split(self._sent[:size], parts)
