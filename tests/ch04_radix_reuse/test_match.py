"""Task 04.2: the longest cached prefix, in whole pages, short of the last token. Trees are built by hand."""

from __future__ import annotations

import pytest

from tests.ch04_radix_reuse.trees import SIZES, Tree, spell


@pytest.mark.parametrize("tokens", [[], [5], list(range(40))])
def test_an_empty_tree_has_nothing(tokens):
    tree = Tree()
    assert tree.cache.match_prefix(tokens) == (tree.root, [])


@pytest.mark.parametrize("size", SIZES)
def test_a_path_of_nodes_gives_its_pages_in_the_order_of_the_tokens(size):
    tree = Tree(size)
    upper = tree.hang(tree.root, "AB")
    lower = tree.hang(upper, "CDE")
    tree.hang(upper, "X")

    node, pages = tree.cache.match_prefix([*spell("ABCDE", size), 7])

    assert pages == [*upper.pages, *lower.pages], "the pages of the prefix, from the first token on"
    assert node is lower, "the deepest node of the prefix"


@pytest.mark.parametrize("size", SIZES)
def test_one_token_is_always_left_to_compute(size):
    tree = Tree(size)
    tree.hang(tree.root, "A")
    tree.hang(tree.nodes()[0], "B")

    _, pages = tree.cache.match_prefix(spell("AB", size))
    assert len(pages) == 1, "the logits of the last token are wanted, so it must go through the model, and its page too"

    _, pages = tree.cache.match_prefix([*spell("AB", size), 9])
    assert len(pages) == 2, "with one token more, both pages may be reused"


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_page_that_is_not_full_is_no_match(missing):
    tree = Tree(size=4)
    tree.hang(tree.nodes()[0] if tree.nodes() else tree.root, "AB")
    tokens = spell("AB", 4)[:-missing]
    _, pages = tree.cache.match_prefix(tokens)
    assert len(pages) == 1, f"the second page lacks {missing} of its 4 tokens"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("same", [0, 1, 2, 3])
def test_the_match_ends_before_the_first_page_that_differs(size, same):
    tree = Tree(size)
    pages = list(tree.hang(tree.root, "ABC").pages)
    tokens = [*spell("ABC"[:same] + "x" * 3, size), 0]

    node, found = tree.cache.match_prefix(tokens)

    assert found == pages[:same], f"{same} pages are the same as the tree's; page {same} differs in its last token"
    assert tree.letters(node) == "ABC"[:same], (
        "the node must end where the match ends: split it, and return its upper part"
    )
    tree.check()


def test_a_node_that_matches_in_part_is_split_there():
    tree = Tree()
    whole = tree.hang(tree.root, "ABCD")
    tree.hang(whole, "E")

    node, _ = tree.cache.match_prefix([*spell("ABxx", 4), 0])

    assert tree.shape() == {"AB": {"CD": {"E": {}}}}, "whoever locks the node must not lock pages that it does not read"
    assert tree.letters(node) == "AB"
    assert tree.letters(whole) == "CD"
    tree.check()


def test_a_prompt_that_ends_inside_a_node_splits_it_too():
    tree = Tree()
    tree.hang(tree.root, "ABCD")
    node, found = tree.find("AB")
    assert (tree.letters(node), found) == ("AB", "AB")
    assert tree.shape() == {"AB": {"CD": {}}}
    tree.check()


def test_a_node_that_matches_whole_is_not_split():
    tree = Tree()
    tree.hang(tree.hang(tree.root, "AB"), "C")
    tree.find("ABC")
    assert tree.shape() == {"AB": {"C": {}}}


def test_only_prefixes_of_the_same_salt_are_found():
    tree = Tree()
    tree.hang(tree.root, "AB", salt="alice")
    assert tree.find("AB", "alice")[1] == "AB"
    assert tree.find("AB", "bob")[1] == "", "a cached prefix tells by its speed that somebody sent these tokens"
    assert tree.find("AB")[1] == ""


def test_salts_are_kept_apart_in_the_same_tree():
    tree = Tree()
    leaves = {salt: tree.hang(tree.root, "AB", salt) for salt in ("", "alice", "bob")}
    for salt, leaf in leaves.items():
        assert tree.find("AB", salt)[0] is leaf


def test_every_node_on_the_way_counts_as_used_now_and_no_other():
    tree = Tree()
    upper = tree.hang(tree.root, "A")
    lower, sibling = tree.hang(upper, "B"), tree.hang(upper, "C")
    before = sibling.last_used

    tree.find("AB")

    newest = max(node.last_used for node in tree.nodes())
    assert (upper.last_used, lower.last_used) == (newest, newest), "one new time a call, for every node on the way"
    assert newest > before, "the time must be later than that of any earlier call"
    assert sibling.last_used == before
    assert (upper.hits, lower.hits, sibling.hits) == (1, 1, 0), "one hit more for each node that the walk passed"


def test_a_partial_hit_refreshes_the_part_that_was_hit():
    tree = Tree()
    whole = tree.hang(tree.root, "AB")
    before = whole.last_used

    upper, _ = tree.find("A")

    assert upper.last_used > before, "these pages were asked for just now: they must not be the next to go"
    assert upper.hits == 1
    assert (whole.last_used, whole.hits) == (before, 0), "the lower part was not asked for"


def test_each_lookup_is_later_than_the_one_before():
    tree = Tree()
    first, second = tree.hang(tree.root, "A"), tree.hang(tree.root, "B")
    times = []
    for text, node in [("A", first), ("B", second), ("A", first)]:
        tree.find(text)
        times.append(node.last_used)
    assert times == sorted(set(times)), f"last_used after three lookups: {times}"


def test_a_lookup_takes_no_page_and_no_lock():
    tree = Tree()
    tree.hang(tree.root, "ABC")
    tree.find("AB")
    assert [node.locks for node in tree.nodes()] == [0, 0]
    tree.check()


def test_the_list_of_pages_is_the_callers_own():
    tree = Tree()
    node = tree.hang(tree.root, "AB")
    _, pages = tree.cache.match_prefix([*spell("AB", 4), 0])
    pages.append(99)  # a request appends its own pages to what it found
    assert 99 not in node.pages, "match_prefix must not hand out the node's own list"
    tree.check()


@pytest.mark.parametrize("kind", [list, tuple])
def test_the_tokens_are_left_as_they_were(kind):
    tree = Tree()
    tree.hang(tree.root, "AB")
    tokens = kind([*spell("AB", 4), 0])
    tree.cache.match_prefix(tokens)
    assert tokens == kind([*spell("AB", 4), 0])
