"""Tasks 04.4 and 04.5: a path is locked from its deepest node to the root, and unlocked the same way."""

from __future__ import annotations

import pytest

from tests.ch04_radix_reuse.trees import Tree


@pytest.fixture
def tree():
    """{"A": {"BC": {"D": {}}, "X": {}}}, built by hand."""
    tree = Tree()
    upper = tree.hang(tree.root, "A")
    middle = tree.hang(upper, "BC")
    tree.hang(middle, "D")
    tree.hang(upper, "X")
    return tree


def node_of(tree: Tree, letters: str):
    [node] = [node for node in tree.nodes() if tree.letters(node) == letters]
    return node


def locks(tree: Tree) -> dict[str, int]:
    return {tree.letters(node): node.locks for node in tree.nodes()}


class TestLock:
    """04.4"""

    def test_the_node_and_all_its_ancestors_are_locked(self, tree):
        tree.cache.lock(node_of(tree, "BC"))
        assert locks(tree) == {"A": 1, "BC": 1, "D": 0, "X": 0}, (
            "a request that reads BC reads A as well; D and X are nothing to it"
        )

    def test_each_lock_counts(self, tree):
        for letters in ("BC", "D", "X"):
            tree.cache.lock(node_of(tree, letters))
        assert locks(tree) == {"A": 3, "BC": 2, "D": 1, "X": 1}, "BC, D and X were locked: all three paths go through A"

    def test_locked_pages_are_not_evictable_any_more(self, tree):
        assert tree.cache.num_evictable == 5
        tree.cache.lock(node_of(tree, "BC"))
        assert tree.cache.num_evictable == 2, "5 pages, of which A, B and C are locked"
        tree.check()

    def test_a_page_that_was_locked_already_is_not_taken_off_twice(self, tree):
        tree.cache.lock(node_of(tree, "BC"))
        tree.cache.lock(node_of(tree, "D"))
        tree.cache.lock(node_of(tree, "D"))
        assert tree.cache.num_evictable == 1, "only X"
        tree.check()

    def test_the_root_has_no_pages_and_no_locks(self, tree):
        tree.cache.lock(tree.root)  # a request without a prefix hit
        tree.cache.lock(node_of(tree, "X"))
        assert tree.root.locks == 0, "stop below the root: it has no parent, no pages and no locks"
        assert tree.cache.num_evictable == 3, "5 pages, of which A and X are locked"

    def test_no_page_changes_hands(self, tree):
        tree.cache.lock(node_of(tree, "D"))
        assert {tree.pages.holders(page) for node in tree.nodes() for page in node.pages} == {1}, (
            "a lock is the tree's own promise; the request holds its pages itself"
        )


class TestUnlock:
    """04.5"""

    def test_it_takes_back_one_lock_along_the_path(self, tree):
        for letters in ("D", "D", "BC", "X"):
            tree.cache.lock(node_of(tree, letters))
        tree.cache.unlock(node_of(tree, "D"))
        assert locks(tree) == {"A": 3, "BC": 2, "D": 1, "X": 1}, "one lock less on D, BC and A; X is not on the path"

    def test_pages_are_evictable_again_when_the_last_lock_goes(self, tree):
        node = node_of(tree, "BC")
        tree.cache.lock(node)
        tree.cache.lock(node)
        tree.cache.unlock(node)
        assert tree.cache.num_evictable == 2, "another request still reads A, B and C"

        tree.cache.unlock(node)

        assert tree.cache.num_evictable == 5
        tree.check()

    def test_a_leaf_that_becomes_free_is_offered_to_eviction(self, tree):
        leaf = node_of(tree, "X")
        leaf.queued = False
        tree.cache._heap = [entry for entry in tree.cache._heap if entry[2] is not leaf]  # evict met it while locked
        tree.cache.lock(leaf)
        tree.cache.unlock(leaf)
        assert leaf.queued, "nobody would ever look at it again"
        assert [entry[2] for entry in tree.cache._heap].count(leaf) == 1

    def test_many_locks_and_unlocks_leave_one_entry_in_the_heap(self, tree):
        leaf = node_of(tree, "D")
        for _ in range(20):
            tree.cache.lock(leaf)
            tree.cache.unlock(leaf)
        tree.check()

    def test_the_root_can_be_unlocked(self, tree):
        tree.cache.lock(tree.root)
        tree.cache.unlock(tree.root)
        assert tree.root.locks == 0
        tree.check()

    def test_unlocking_what_is_not_locked_is_our_own_bug(self, tree):
        with pytest.raises(AssertionError):
            tree.cache.unlock(node_of(tree, "D"))

    def test_a_path_that_was_split_while_locked_is_unlocked_to_the_last_node(self, tree):
        node = node_of(tree, "BC")
        tree.cache.lock(node)
        tree.find("AB")  # another request, whose prompt ends inside the node
        assert locks(tree) == {"A": 1, "B": 1, "C": 1, "D": 0, "X": 0}
        tree.check()

        tree.cache.unlock(node)

        assert set(locks(tree).values()) == {0}
        tree.check()
