"""Task 04.1: a node is cut in two, and nothing else changes."""

from __future__ import annotations

import pytest

from tests.ch04_radix_reuse.trees import SIZES, Tree, spell


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_tokens_and_pages_are_cut_at_the_same_place(size, cut):
    tree = Tree(size)
    node = tree.hang(tree.root, "ABCD")
    pages = list(node.pages)

    upper = tree.cache._split(node, cut)

    assert (upper.pages, node.pages) == (pages[:cut], pages[cut:]), "the upper part takes the first pages"
    assert list(upper.tokens) == spell("ABCD"[:cut], size), "a page is page_size tokens: cut the tokens there too"
    assert list(node.tokens) == spell("ABCD"[cut:], size)


def test_the_upper_part_stands_between_the_parent_and_the_lower_part():
    tree = Tree()
    parent = tree.hang(tree.root, "X")
    sibling = tree.hang(parent, "S")
    node = tree.hang(parent, "AB")

    upper = tree.cache._split(node, 1)

    assert tree.shape() == {"X": {"S": {}, "A": {"B": {}}}}
    assert upper.parent is parent
    assert node.parent is upper, "the lower part's parent is the new node"
    assert sibling.parent is parent
    tree.check()


def test_whoever_knows_the_node_keeps_its_lower_end():
    tree = Tree()
    node = tree.hang(tree.root, "AB")

    upper = tree.cache._split(node, 1)

    assert upper is not node, "a request that locked the node would now hold only half of its path"
    assert tree.letters(node) == "B"
    assert tree.letters(upper) == "A"


def test_children_stay_below_the_lower_part():
    tree = Tree()
    node = tree.hang(tree.root, "AB")
    children = [tree.hang(node, "C"), tree.hang(node, "D")]

    tree.cache._split(node, 1)

    assert tree.shape() == {"A": {"B": {"C": {}, "D": {}}}}
    assert all(child.parent is node for child in children)
    tree.check()


def test_both_parts_are_locked_as_often_as_the_whole_was():
    tree = Tree()
    node = tree.hang(tree.root, "AB")
    node.locks, tree.cache.num_evictable = 3, 0

    upper = tree.cache._split(node, 1)

    assert node.locks == 3
    assert upper.locks == 3, "every request below goes through the upper part, too, and will unlock it"
    tree.check()


def test_both_parts_keep_age_last_use_hits_and_salt():
    tree = Tree()
    node = tree.hang(tree.root, "AB", salt="tenant")
    node.created, node.last_used, node.hits = 5, 9, 4

    upper = tree.cache._split(node, 1)

    for part in (upper, node):
        assert (part.created, part.last_used, part.hits, part.salt) == (5, 9, 4, "tenant")
    tree.check()


def test_no_page_changes_hands():
    tree = Tree()
    node = tree.hang(tree.root, "ABC")
    holders = [tree.pages.holders(page) for page in node.pages]
    pages = list(node.pages)

    tree.cache._split(node, 2)

    assert [tree.pages.holders(page) for page in pages] == holders, "the tree held these pages before, and still does"
    assert (tree.cache.num_pages, tree.cache.num_evictable) == (3, 3)


def test_the_upper_part_is_not_in_the_eviction_heap():
    tree = Tree()
    node = tree.hang(tree.root, "AB")
    assert node.queued

    upper = tree.cache._split(node, 1)

    assert not upper.queued, "queued says that the heap has an entry for this node: the old entry is the lower part's"
    assert node.queued
    assert [entry for _, _, entry in tree.cache._heap] == [node]


def test_a_node_can_be_split_again_and_again():
    tree = Tree()
    node = tree.hang(tree.root, "ABCD")
    for cut in (3, 2, 1):
        node = tree.cache._split(node, cut)
    assert tree.shape() == {"A": {"B": {"C": {"D": {}}}}}
    tree.check()
