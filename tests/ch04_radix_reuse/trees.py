"""Trees of letters: a letter stands for one whole page of tokens, so that a test can be read at a glance."""

from __future__ import annotations

from collections import Counter
from typing import Any

from minisgl.kvcache.pages import PageAllocator
from minisgl.kvcache.radix_cache import Node, RadixCache

SIZES = (1, 3, 16)  # tokens in a page


def spell(text: str, size: int) -> list[int]:
    """The tokens of these pages. Pages of two letters differ in their last token only: nothing less is a match."""
    return [token for letter in text for token in [1] * (size - 1) + [ord(letter)]]


class Tree:
    """A cache on a pool of its own, with a few words to build it and to look at it."""

    def __init__(self, size: int = 4, num_pages: int = 64, policy: str = "lru") -> None:
        self.size = size
        self.pages = PageAllocator(num_pages + 1)
        self.cache = RadixCache(self.pages, size, policy)
        self.root = self.cache.root

    def hang(self, parent: Node, text: str, salt: str = "") -> Node:
        """Add a leaf by hand, without insert. Nobody but the tree holds its pages."""
        self.cache._clock += 1
        mine = self.pages.alloc(len(text))
        leaf = self.cache._add_leaf(parent, tuple(spell(text, self.size)), list(mine), salt)
        self.pages.release(mine)
        return leaf

    def put(self, text: str, salt: str = "") -> Node:
        """Insert pages that nobody else holds afterwards: what a request that has ended leaves behind."""
        mine = self.pages.alloc(len(text))
        node, _ = self.cache.insert(spell(text, self.size), mine, salt)
        self.pages.release(mine)
        return node

    def find(self, text: str, salt: str = "") -> tuple[Node, str]:
        """Match these pages and one token more; the node, and the letters found."""
        node, pages = self.cache.match_prefix([*spell(text, self.size), 0], salt)
        return node, text[: len(pages)]

    def letters(self, node: Node) -> str:
        """What a node's tokens spell."""
        return "".join(chr(token) for token in node.tokens[self.size - 1 :: self.size])

    def shape(self, node: Node | None = None) -> dict[str, Any]:
        """Nested: {"AB": {"C": {}, "D": {}}}."""
        children = (node or self.root).children.values()
        return {self.letters(child): self.shape(child) for child in children}

    def nodes(self) -> list[Node]:
        """All but the root, parents first."""
        found = [self.root]
        for node in found:  # grows while it is walked
            found += node.children.values()
        return found[1:]

    def check(self, requests: dict[int, int] | None = None) -> None:
        """Everything that holds between two calls, whatever they were.

        Args:
            requests: how many others hold a page; nobody if it is not given.
        """
        held = Counter(requests or {})
        size = self.size
        for node in self.nodes():
            name = f"node {self.letters(node)!r} of {self.shape()}"
            assert node.tokens, f"{name}: a node must have tokens"
            assert len(node.tokens) == len(node.pages) * size, f"{name}: {len(node.tokens)} tokens, {node.pages}"
            assert node.parent.children.get((node.salt, node.tokens[:size])) is node, f"{name}: its parent lost it"
            assert node.locks >= sum(child.locks for child in node.children.values()), f"{name}: locks above < below"
            if not (node.locks or node.children):
                assert node.queued, f"{name} could be evicted, but eviction does not know of it"
            held.update(node.pages)
        held_by_tree = sum(len(node.pages) for node in self.nodes())
        unlocked = sum(len(node.pages) for node in self.nodes() if not node.locks)
        where = f"in {self.shape()}"
        num_pages, num_evictable = self.cache.num_pages, self.cache.num_evictable
        assert num_pages == held_by_tree, f"num_pages is {num_pages}, but the nodes have {held_by_tree} pages, {where}"
        assert num_evictable == unlocked, (
            f"num_evictable is {num_evictable}, but {unlocked} pages are unlocked, {where}"
        )
        for page in range(1, self.pages.capacity + 1):
            holders = self.pages.holders(page)
            assert holders == held[page], f"page {page} has {holders} holders, it should have {held[page]}, {where}"
        entries = Counter(id(node) for _, _, node in self.cache._heap)
        assert all(n == 1 for n in entries.values()), "a node stands in the heap twice"
