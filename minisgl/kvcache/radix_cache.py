"""Which prefixes are in memory: a radix tree whose edges are whole pages of tokens.

Knows pages as ints and tokens as ints, nothing of requests or tensors. The tree is one holder of its pages among
others: dropping a node frees only what nobody else holds.
Idea: SGLang's RadixAttention (Zheng et al., 2024).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from minisgl.kvcache.pages import PageAllocator

Key = tuple[str, tuple[int, ...]]  # the salt and the first page's tokens


@dataclass(eq=False, slots=True)
class Node:
    """An edge of the tree and its lower end: a run of whole pages and the tokens in them."""

    salt: str
    tokens: tuple[int, ...]
    pages: list[int]
    parent: Node | None
    created: int = 0
    last_used: int = 0
    hits: int = 0
    locks: int = 0  # running requests whose prefix goes through here
    children: dict[Key, Node] = field(default_factory=dict)
    queued: bool = False  # has an entry in the eviction heap


# What goes first: the node with the smallest value. None of these can fall while a node waits in the heap.
POLICIES: dict[str, Callable[[Node], tuple[int, ...]]] = {
    "lru": lambda node: (node.last_used,),
    "lfu": lambda node: (node.hits, node.last_used),
    "fifo": lambda node: (node.created,),
}


class RadixCache:
    """The tree of computed prefixes.

    Args:
        pages: the allocator whose pages the tree holds.
        page_size: tokens in a page; only whole pages are shared, since a partial one is still being written.
        policy: lru, lfu or fifo.
    """

    def __init__(self, pages: PageAllocator, page_size: int, policy: str = "lru") -> None:
        self.pages, self.page_size = pages, page_size
        self.root = Node("", (), [], None)
        self.num_pages = 0  # that the tree holds
        self.num_evictable = 0  # of those, on no running request's path
        self._rank = POLICIES[policy]
        self._heap: list[tuple[tuple[int, ...], int, Node]] = []  # at most one entry a node
        self._serial, self._clock = count(), 0

    def match_prefix(self, tokens: Sequence[int], salt: str = "") -> tuple[Node, list[int]]:
        """Find the longest prefix of tokens in the tree, in whole pages, short of the last token.

        The last token is left out because its logits are wanted: at least one token must go through the model.
        A node that matches in part is split there. Every node on the way counts as used.

        Returns:
            The deepest node of the prefix (the root for none), and the prefix's pages from the first token on.
        """
        size = self.page_size
        wanted = tuple(tokens[: (len(tokens) - 1) // size * size])
        node, pages = self.root, list[int]()
        self._clock += 1
        while child := node.children.get(self._key(wanted[len(pages) * size :], salt)):
            shared = self._common_pages(child, wanted[len(pages) * size :])
            node = self._split(child, shared) if shared < len(child.pages) else child
            node.last_used = self._clock
            node.hits += 1
            pages += node.pages
        return node, pages

    def insert(self, tokens: Sequence[int], pages: Sequence[int], salt: str = "") -> tuple[Node, list[int]]:
        """Make whole pages of computed tokens matchable. The tree holds those that it did not have yet.

        Args:
            tokens: len(pages) · page_size ids, which are copied.
            pages: where their K and V are, held by the caller.

        Returns:
            The deepest node, and the tree's own pages for these tokens: where it differs from `pages`, another request
            computed the same tokens first.
        """
        size = self.page_size
        wanted = tuple(tokens)
        node, own = self.root, list[int]()
        self._clock += 1
        while len(own) < len(pages):
            rest = wanted[len(own) * size :]
            child = node.children.get(self._key(rest, salt))
            if child is None:
                child = self._add_leaf(node, rest, list(pages[len(own) :]), salt)
            shared = self._common_pages(child, rest)
            node = self._split(child, shared) if shared < len(child.pages) else child
            node.last_used = self._clock
            own += node.pages
        return node, own

    def lock(self, node: Node) -> None:
        """Protect a node and all its ancestors from eviction: a request reads these pages."""
        while node.parent is not None:
            if node.locks == 0:
                self.num_evictable -= len(node.pages)
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Take back one lock along the path."""
        while node.parent is not None:
            assert node.locks > 0, "unlocked more often than locked"
            node.locks -= 1
            if node.locks == 0:
                self.num_evictable += len(node.pages)
                self._offer(node)
            node = node.parent

    def evict(self, num_pages: int) -> int:
        """Drop pages from the tails of unlocked leaves, in the policy's order, until num_pages went or none is left.

        Returns:
            How many pages went.
        """
        gone = 0
        while gone < num_pages and self._heap:
            rank, _, node = heapq.heappop(self._heap)
            node.queued = False
            if node.locks or node.children:
                continue  # offered again when that changes
            if rank != self._rank(node):  # used since it was offered
                self._offer(node)
                continue
            assert node.parent is not None
            key = self._key(node.tokens, node.salt)
            kept = max(0, len(node.pages) - (num_pages - gone))
            dropped = node.pages[kept:]
            node.tokens, node.pages = node.tokens[: kept * self.page_size], node.pages[:kept]
            self.pages.release(dropped)
            self.num_pages -= len(dropped)
            self.num_evictable -= len(dropped)
            gone += len(dropped)
            if not kept:
                del node.parent.children[key]
            self._offer(node if kept else node.parent)
        return gone

    def _key(self, tokens: tuple[int, ...], salt: str) -> Key:
        return salt, tokens[: self.page_size]

    def _common_pages(self, node: Node, tokens: tuple[int, ...]) -> int:
        """How many of the node's pages hold the first of these tokens; the first page was found by its key."""
        size = self.page_size
        most = min(len(node.pages), len(tokens) // size)
        if node.tokens[: most * size] == tokens[: most * size]:
            return most
        return next(
            i for i in range(most) if node.tokens[i * size : (i + 1) * size] != tokens[i * size : (i + 1) * size]
        )

    def _split(self, node: Node, num_pages: int) -> Node:
        """Cut a node after num_pages pages; returns the new upper part. Whoever knows the node keeps its lower end."""
        cut = num_pages * self.page_size
        assert node.parent is not None
        upper = replace(node, tokens=node.tokens[:cut], pages=node.pages[:num_pages], children={}, queued=False)
        node.parent.children[self._key(upper.tokens, node.salt)] = upper
        node.tokens, node.pages, node.parent = node.tokens[cut:], node.pages[num_pages:], upper
        upper.children[self._key(node.tokens, node.salt)] = node
        return upper

    def _add_leaf(self, parent: Node, tokens: tuple[int, ...], pages: list[int], salt: str) -> Node:
        leaf = Node(salt, tokens, pages, parent, created=self._clock, last_used=self._clock)
        parent.children[self._key(tokens, salt)] = leaf
        self.pages.hold(pages)
        self.num_pages += len(pages)
        self.num_evictable += len(pages)
        self._offer(leaf)
        return leaf

    def _offer(self, node: Node) -> None:
        """Let the heap know of a node that may be evicted."""
        if node.parent is not None and not (node.locks or node.children or node.queued):
            node.queued = True
            heapq.heappush(self._heap, (self._rank(node), next(self._serial), node))


class NoPrefixCache(RadixCache):
    """The switch's off side: a tree that stays empty, so that nothing is ever found."""

    def insert(self, tokens: Sequence[int], pages: Sequence[int], salt: str = "") -> tuple[Node, list[int]]:
        """Keep nothing."""
        return self.root, list(pages)


PREFIX_CACHES = {"none": NoPrefixCache, "radix": RadixCache}
