"""Task 04.3: computed pages become matchable, once, and the tree says which ones it kept."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ch04_radix_reuse.trees import SIZES, Tree, spell


def insert(tree: Tree, text: str, pages: list[int], salt: str = ""):
    return tree.cache.insert(spell(text, tree.size), pages, salt)


@pytest.mark.parametrize("size", SIZES)
def test_what_was_inserted_is_found(size):
    tree = Tree(size)
    mine = tree.pages.alloc(3)

    node, own = insert(tree, "ABC", mine)

    assert own == mine
    assert tree.letters(node) == "ABC"
    assert tree.cache.match_prefix([*spell("ABC", size), 0]) == (node, mine)


def test_the_tree_is_one_more_holder():
    tree = Tree()
    mine = tree.pages.alloc(2)
    insert(tree, "AB", mine)
    assert [tree.pages.holders(page) for page in mine] == [2, 2], "the caller, and now the tree"

    tree.pages.release(mine)

    assert tree.pages.num_free == tree.pages.capacity - 2, "the tree still holds both"
    tree.check()


def test_later_changes_of_the_callers_lists_do_not_reach_the_tree():
    tree = Tree()
    mine, tokens = tree.pages.alloc(2), spell("AB", 4)
    node, own = tree.cache.insert(tokens, mine)

    mine.append(99)  # as a request that grows
    tokens[0] = 0
    own.append(98)

    assert len(node.pages) == 2, "keep a copy of the caller's list of pages"
    assert list(node.tokens) == spell("AB", 4)


def test_of_two_copies_the_tree_keeps_the_first():
    tree = Tree()
    first, second = tree.pages.alloc(2), tree.pages.alloc(2)
    insert(tree, "AB", first)

    node, own = insert(tree, "AB", second)

    assert own == first, "the caller must learn that others computed these tokens first, and where"
    assert node.pages == first
    assert [tree.pages.holders(page) for page in second] == [1, 1], (
        "the duplicates are the caller's: the tree neither holds them nor releases them, for a step may be reading them"
    )
    assert [tree.pages.holders(page) for page in first] == [2, 2], "held by the tree once, not twice"


def test_a_longer_sequence_adds_only_what_is_new():
    tree = Tree()
    first, second = tree.pages.alloc(2), tree.pages.alloc(4)
    insert(tree, "AB", first)

    node, own = insert(tree, "ABCD", second)

    assert tree.shape() == {"AB": {"CD": {}}}
    assert own == [*first, *second[2:]], "the tree's pages for what it had, and the caller's for what it had not"
    assert node.pages == second[2:]
    tree.check({page: 1 for page in [*first, *second]})


def test_a_sequence_that_differs_midway_makes_a_branch():
    tree = Tree()
    first, second = tree.pages.alloc(3), tree.pages.alloc(3)
    insert(tree, "ABC", first)

    node, own = insert(tree, "ABD", second)

    assert tree.shape() == {"AB": {"C": {}, "D": {}}}
    assert own == [*first[:2], second[2]], "the tree's pages for what it had, and the caller's for what it had not"
    assert tree.letters(node) == "D"
    tree.check({page: 1 for page in [*first, *second]})


def test_a_sequence_that_ends_inside_a_node_splits_it():
    tree = Tree()
    tree.put("ABC")
    node = tree.put("A")
    assert tree.letters(node) == "A", "the node returned is locked: it must end where the inserted pages end"
    assert tree.shape() == {"A": {"BC": {}}}
    tree.check()


def test_no_page_is_no_change():
    tree = Tree()
    tree.put("AB")
    assert tree.cache.insert([], []) == (tree.root, [])
    assert tree.shape() == {"AB": {}}


def test_inserting_again_changes_nothing():
    tree = Tree()
    mine = tree.pages.alloc(2)
    for _ in range(3):
        node, own = insert(tree, "AB", mine)
        assert (tree.letters(node), own) == ("AB", mine)
        tree.check({page: 1 for page in mine})


def test_each_salt_has_its_own_copy():
    tree = Tree()
    for salt in ("", "alice", "bob"):
        tree.put("AB", salt)
    assert tree.cache.num_pages == 6
    assert {node.salt for node in tree.nodes()} == {"", "alice", "bob"}
    assert tree.find("AB", "carol")[1] == ""


def test_new_pages_may_be_evicted_until_somebody_locks_them():
    tree = Tree()
    tree.put("AB")
    tree.put("ABCD")
    assert (tree.cache.num_pages, tree.cache.num_evictable) == (4, 4), "A and B were there, C and D are new: 4 pages"
    tree.check()


def test_every_node_on_the_way_is_refreshed():
    tree = Tree()
    tree.put("AB")
    old = tree.put("X")
    tree.put("ABC")
    upper, lower = (node for node in tree.nodes() if node is not old)
    assert upper.last_used == lower.last_used, "one new time a call, for every node on the way"
    assert lower.last_used > old.last_used, "X was not on the way"
    assert lower.created == lower.last_used > upper.created, "only what is new was created now"


def test_inserting_is_no_hit():
    tree = Tree()
    tree.put("AB")
    tree.put("ABC")
    assert [node.hits for node in tree.nodes()] == [0, 0], "hits count lookups: who computed a page did not save it"


WORDS = st.text(alphabet="AB", max_size=6)


@settings(max_examples=60, deadline=None)
@given(words=st.lists(st.tuples(WORDS, st.sampled_from(["", "salt"])), max_size=8), size=st.sampled_from(SIZES))
def test_any_sequence_is_found_as_far_as_one_that_was_inserted_begins_with_it(words, size):
    tree = Tree(size)
    for i, (word, salt) in enumerate(words):
        known = [w for w, s in words[:i] if s == salt]
        expected = max((len(_common(word, w)) for w in known), default=0)
        assert len(tree.find(word, salt)[1]) == expected, f"{word!r} after {words[:i]}"
        tree.put(word, salt)
        tree.check()
    kept = {(salt, word[:n]) for word, salt in words for n in range(1, len(word) + 1)}
    assert tree.cache.num_pages == len(kept), "each prefix has one page, however often it came"


def _common(a: str, b: str) -> str:
    return next((a[:i] for i in range(min(len(a), len(b)), 0, -1) if a[:i] == b[:i]), "")
