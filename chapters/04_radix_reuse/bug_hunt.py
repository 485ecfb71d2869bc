"""A cache manager that shares a little more than whole pages. It has one bug: find it.

One request after another is answered as by the engine's own manager. Side by side, answers may turn into other ones.
Run `pytest tests/ch04_radix_reuse/test_bug_hunt.py --runxfail` to see the symptom, and again to see it gone.
"""

from __future__ import annotations

from itertools import takewhile

from minisgl.core import Request
from minisgl.kvcache.cache_manager import CacheManager
from minisgl.kvcache.pages import PageAllocator
from minisgl.kvcache.radix_cache import RadixCache


class TailSharing(CacheManager):
    """Lets a request share the last page of a running one too, as far as their tokens are the same.

    The tree finds whole pages only, so up to page_size - 1 tokens of a common prefix are computed again. But their K
    and V are in the pool: in the page that the running request fills now.
    """

    def __init__(self, pages: PageAllocator, page_size: int, prefix: RadixCache) -> None:
        super().__init__(pages, page_size, prefix)
        self._computed: dict[int, tuple[Request, int]] = {}  # running requests, and how many tokens went through

    def publish(self, request: Request, num_tokens: int) -> bool:
        """See CacheManager.publish."""
        self._computed[request.id] = request, num_tokens
        return super().publish(request, num_tokens)

    def detach(self, request: Request) -> None:
        """See CacheManager.detach."""
        self._computed.pop(request.id, None)
        super().detach(request)

    def attach(self, request: Request) -> None:
        """See CacheManager.attach; then look for a running request that has more of these tokens."""
        super().attach(request)
        for other, computed in self._computed.values():
            pairs = zip(other.tokens[:computed], request.tokens[:-1], strict=False)  # the last token is always computed
            common = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            if common > request.num_computed:
                tail = other.pages[common // self.page_size]
                self.pages.hold([tail])
                request.pages.append(tail)
                request.num_computed = common
                return
