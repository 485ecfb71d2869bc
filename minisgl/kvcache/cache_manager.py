"""What a request holds: its pages, and its path in the prefix tree. Ints only."""

from minisgl.core import Request
from minisgl.kvcache.pages import PageAllocator
from minisgl.kvcache.radix_cache import RadixCache


class CacheManager:
    """Gives pages to requests and takes them back, with the prefix cache as the reserve.

    Args:
        pages: the allocator.
        page_size: tokens in a page.
        prefix: the prefix cache, built on the same allocator.
    """

    def __init__(self, pages: PageAllocator, page_size: int, prefix: RadixCache) -> None:
        self.pages, self.page_size, self.prefix = pages, page_size, prefix

    @property
    def num_available(self) -> int:
        """Pages that a request could get: free ones, and those that only the prefix cache holds."""
        return self.pages.num_free + self.prefix.num_evictable

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-num_tokens // self.page_size)

    def attach(self, request: Request) -> None:
        """Give a request without pages the prefix of its tokens that is cached, locked and held."""
        request.node, request.pages = self.prefix.match_prefix(request.tokens, request.params.cache_salt)
        self.prefix.lock(request.node)
        self.pages.hold(request.pages)
        request.num_computed = len(request.pages) * self.page_size

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Let the request's pages hold num_tokens, evicting where needed. False if that is impossible; then nothing
        has changed."""
        missing = self.pages_for(num_tokens) - len(request.pages)
        if missing > self.num_available:
            return False
        if missing > 0:
            self.prefix.evict(missing - self.pages.num_free)
            request.pages += self.pages.alloc(missing)
        return True

    def publish(self, request: Request, num_tokens: int) -> bool:
        """Make the whole pages of the first num_tokens matchable; their forward pass must be over.

        Where another request computed the same tokens first, this one moves over to the other's pages and lets its own
        go: equal tokens behind an equal prefix have equal K and V.

        Returns:
            Whether the request's page table changed.
        """
        whole = num_tokens // self.page_size
        mine = request.pages[:whole]
        node, shared = self.prefix.insert(request.tokens[: whole * self.page_size], mine, request.params.cache_salt)
        self.prefix.lock(node)
        self.prefix.unlock(request.node)
        request.node = node
        if shared == mine:
            return False
        self.pages.hold(shared)
        self.pages.release(mine)
        request.pages[:whole] = shared
        return True

    def detach(self, request: Request) -> None:
        """Take everything back. What was published stays in the prefix cache until it is evicted."""
        self.prefix.unlock(request.node)
        self.pages.release(request.pages)
        request.node, request.pages, request.num_computed = None, [], 0
