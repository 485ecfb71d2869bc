"""Task 04.6: pages come back from the tails of unlocked leaves, in the policy's order, and not one more than asked."""

from __future__ import annotations

import random

import pytest

from tests.ch04_radix_reuse.trees import SIZES, Tree

POLICIES = ("lru", "lfu", "fifo")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", SIZES)
def test_evicted_pages_are_free_and_found_no_more(size, policy):
    tree = Tree(size, policy=policy)
    tree.put("AB")

    assert tree.cache.evict(2) == 2

    assert tree.pages.num_free == tree.pages.capacity
    assert tree.find("AB")[1] == ""
    assert tree.shape() == {}
    tree.check()


@pytest.mark.parametrize("wanted", [0, -3])
def test_nothing_goes_when_nothing_is_needed(wanted):
    tree = Tree()
    tree.put("AB")
    assert tree.cache.evict(wanted) == 0
    assert tree.shape() == {"AB": {}}


def test_a_leaf_loses_its_tail_and_keeps_what_need_not_go():
    tree = Tree()
    pages = list(tree.put("ABCD").pages)

    assert tree.cache.evict(1) == 1, "the leaf has 4 pages and one is wanted: cut it"

    assert tree.find("ABCD")[1] == "ABC", "a prefix stays useful without its end, but not without its beginning"
    assert tree.pages.holders(pages[3]) == 0, "the page at the leaf's end is the one that goes"
    tree.check()


def test_a_leaf_that_was_cut_can_be_cut_again():
    tree = Tree()
    tree.put("ABCD")
    for left in ("ABC", "AB", "A", ""):
        assert tree.cache.evict(1) == 1, f"a leaf that keeps pages must be offered again: now {tree.shape()}"
        assert tree.shape() == ({left: {}} if left else {}), "tokens and pages go together, from the leaf's end"
        tree.check()
    assert tree.cache.evict(1) == 0


def test_it_goes_on_from_leaf_to_leaf_and_then_to_their_parents():
    tree = Tree()
    for text in ("ABC", "ABD", "X"):
        tree.put(text)
    assert tree.shape() == {"AB": {"C": {}, "D": {}}, "X": {}}

    assert tree.cache.evict(4) == 4, "a parent without children is a leaf, in the same call"

    assert tree.cache.num_pages == 1
    tree.check()
    assert tree.cache.evict(100) == 1, "the number that went is returned, also when it is less than what was asked for"
    assert tree.shape() == {}
    tree.check()


def test_an_inner_node_stays_as_long_as_it_has_children():
    tree = Tree(policy="fifo")
    tree.put("A")
    tree.put("AB")  # A is older, and its child needs it
    assert tree.cache.evict(1) == 1
    assert tree.shape() == {"A": {}}
    tree.check()


def test_a_locked_path_stays_whole():
    tree = Tree()
    node = tree.put("AB")
    tree.cache.lock(node)
    tree.put("ABC")
    tree.put("X")

    assert tree.cache.evict(100) == 2, "C and X; A and B are being read"

    assert tree.find("AB")[1] == "AB"
    tree.check()
    tree.cache.unlock(node)
    assert tree.cache.evict(100) == 2, "A and B are unlocked now"
    tree.check()


def test_a_leaf_met_while_it_was_locked_is_evicted_later():
    tree = Tree()
    node = tree.put("AB")
    tree.cache.lock(node)
    assert tree.cache.evict(1) == 0, "a locked leaf must not be evicted"
    tree.cache.unlock(node)
    tree.check()
    assert tree.cache.evict(2) == 2, (
        "the entry is popped, so queued must be False: else unlock cannot offer the leaf again"
    )


def test_a_page_that_a_request_still_holds_leaves_the_tree_but_is_not_free():
    tree = Tree()
    mine = tree.pages.alloc(1)
    tree.cache.insert([*range(4)], mine)

    tree.cache.evict(1)

    assert tree.shape() == {}
    assert tree.pages.holders(mine[0]) == 1, "the tree is one holder among others"


class TestOrder:
    """Which leaf goes first. Each test evicts one page after another and notes whose it was."""

    def order(self, tree: Tree) -> str:
        gone = ""
        while tree.cache.num_pages:
            before = {tree.letters(node) for node in tree.nodes()}
            assert tree.cache.evict(1) == 1
            gone += (before - {tree.letters(node) for node in tree.nodes()}).pop()
            tree.check()
        return gone

    def tree(self, policy: str) -> Tree:
        """A, B, C and D were computed in this order."""
        tree = Tree(policy=policy)
        for letter in "ABCD":
            tree.put(letter)
        return tree

    def test_fifo_takes_the_oldest_whatever_was_used(self):
        tree = self.tree("fifo")
        for letter in "AAB":
            tree.find(letter)
        assert self.order(tree) == "ABCD", "first computed, first gone; when it was used does not matter"

    def test_lru_takes_what_was_not_used_for_longest(self):
        tree = self.tree("lru")
        for letter in "CABA":
            tree.find(letter)
        assert self.order(tree) == "DCBA", "D was never found, and the others were last found as C, B, A"

    def test_lru_counts_an_insert_as_use(self):
        tree = self.tree("lru")
        tree.put("A")
        assert self.order(tree) == "BCDA", "A was inserted again, so it was used last"

    def test_lfu_takes_what_was_hit_least_and_of_equals_the_least_recent(self):
        tree = self.tree("lfu")
        for letter in "AACDB":
            tree.find(letter)
        assert self.order(tree) == "CDBA", "A has two hits; of the others, found once each, C was first and B was last"

    def test_use_counts_also_when_it_came_after_the_leaf_was_offered(self):
        tree = self.tree("lru")
        assert tree.cache.evict(1) == 1  # A goes, and the heap now has entries for B, C and D
        for letter in "BCB":
            tree.find(letter)
        assert self.order(tree) == "DCB", "an entry whose rank has changed must be offered again, not evicted"

    @pytest.mark.parametrize(("policy", "kept"), [("lru", "BC"), ("fifo", "BC"), ("lfu", "AC")])
    def test_a_favourite_that_rests_is_kept_by_lfu_only(self, policy, kept):
        tree = Tree(policy=policy)
        tree.put("A")
        for _ in range(3):
            tree.find("A")
        for letter in "BC":
            tree.put(letter)
        tree.cache.evict(1)
        assert "".join(sorted(tree.shape())) == kept


def test_a_prefix_is_never_evicted_before_what_stands_on_it():
    tree = Tree(policy="lru")
    tree.put("AB")
    tree.put("AC")
    tree.find("A")
    for _ in range(3):
        tree.cache.evict(1)
        tree.check()
        if tree.cache.num_pages:
            assert tree.find("A")[1] == "A"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(8))
def test_the_books_are_right_after_any_operation(policy, seed):
    """Random inserts, hits, locks, splits and evictions on a small pool."""
    chance = random.Random(seed)
    tree = Tree(size=chance.choice(SIZES), num_pages=12, policy=policy)
    locked = []
    for _ in range(150):
        word = "".join(chance.choice("AB") for _ in range(chance.randrange(6)))
        action = chance.choice(["put", "put", "lock", "unlock", "evict"])
        if action == "put":
            free = tree.pages.num_free
            gone = tree.cache.evict(len(word) - free)
            assert gone == min(max(0, len(word) - free), gone + tree.cache.num_evictable)
            if len(word) <= tree.pages.num_free:
                tree.put(word)
        elif action == "lock" and len(locked) < 3:
            node, found = tree.find(word)
            tree.cache.lock(node)
            locked.append((node, found))
        elif action == "unlock" and locked:
            tree.cache.unlock(locked.pop(chance.randrange(len(locked)))[0])
        elif action == "evict":
            wanted = chance.randrange(4)
            possible = tree.cache.num_evictable
            assert tree.cache.evict(wanted) == min(wanted, possible), "num_evictable pages can be had, no less"
        tree.check()
        for node, found in locked:
            assert tree.letters(node) == found[len(found) - len(node.pages) :], "a locked node lost pages"
    for node, _ in locked:
        tree.cache.unlock(node)
    tree.cache.evict(100)
    assert tree.pages.num_free == tree.pages.capacity, "at the end the pool is whole"
    tree.check()
