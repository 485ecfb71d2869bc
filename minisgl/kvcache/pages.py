"""Physical KV pages and who holds them.

Knows nothing of tokens, requests or tensors: a page is an int, and it is free exactly when nobody holds it.
Idea: vLLM's PagedAttention (Kwon et al., 2023); counts as in an operating system's page frames.
"""

from collections.abc import Iterable


class OutOfPages(Exception):
    """Fewer free pages than asked for; nothing was allocated."""


class PageAllocator:
    """Hands out pages 1 … num_pages - 1; page 0 is the dummy that padding rows may write."""

    def __init__(self, num_pages: int) -> None:
        self._holders = [0] * num_pages
        self._free = list(range(num_pages - 1, 0, -1))  # pop() gives low pages first: traces are easier to read

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Pages that can be handed out."""
        return len(self._holders) - 1

    def holders(self, page: int) -> int:
        """How many hold this page."""
        return self._holders[page]

    def alloc(self, n: int) -> list[int]:
        """Take n pages, each held once. All or nothing: raises OutOfPages and changes nothing if fewer are free."""
        if n > len(self._free):
            raise OutOfPages(f"{n} pages asked for, {len(self._free)} free")
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """One more holder for each of these pages, which somebody holds already."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free: it must be allocated, not held"
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder less for each of these pages; those that nobody holds any more are free."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free already"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)
