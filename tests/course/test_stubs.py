"""Stubs: the final module without the bodies of its task functions."""

from __future__ import annotations

import pytest

from chapters.manifest import CourseError, load_chapters
from chapters.stubs import code_lines, stub


def test_only_the_bodies_of_this_and_later_chapters_tasks_and_their_comments_are_replaced(root):
    source = (root / "toy" / "sums.py").read_text(encoding="utf-8")
    bodies = {
        "    # the trick\n    return x + x  # same line\n": "    {01.1 Double}\n",
        "        for _ in range(times):\n"
        "            self.total += x\n"
        "        return self.total\n"
        "        # the end\n": '        {01.2 Add \\"twice\\"}\n',
        "    while n:\n        yield n\n        n -= 1\n": "    {01.3 Count down}\n",
    }
    expected = source
    for body, task in bodies.items():
        assert body in source
        expected = expected.replace(body, task)
    expected = expected.replace("{", 'raise NotImplementedError("').replace("}", ': see chapters/01_sums")')
    expected = expected.replace("return x // 2", 'raise NotImplementedError("12.1 Halve: see chapters/12_more")')

    assert stub(root, load_chapters(root)[0], "toy.sums") == expected


def test_a_later_chapters_stub_keeps_the_earlier_chapters_bodies(root):
    source = (root / "toy" / "sums.py").read_text(encoding="utf-8")

    text = stub(root, load_chapters(root)[1], "toy.sums")

    assert text == source.replace("return x // 2", 'raise NotImplementedError("12.1 Halve: see chapters/12_more")')


def test_functions_methods_and_generators_raise_their_message_when_called(root):
    scope = {}
    exec(stub(root, load_chapters(root)[0], "toy.sums"), scope)

    for call in (lambda: scope["double"](1), lambda: scope["Tally"]().add(1), lambda: scope["countdown"](1)):
        with pytest.raises(NotImplementedError, match=r"^01\.\d .*: see chapters/01_sums$"):
            call()


def test_a_body_that_begins_with_a_comment_or_a_decorated_function_goes_as_a_whole(root, edit):
    edit(
        "toy/sums.py",
        '    """Twice x."""\n    # the trick\n    return x + x  # same line\n',
        "    # secret\n    @contextlib.contextmanager\n    def inner():\n        yield x\n"
        "    with inner() as y:\n        return y + y\n",
    )

    text = stub(root, load_chapters(root)[0], "toy.sums")

    assert 'def double(x: int) -> int:\n    raise NotImplementedError("01.1 ' in text
    assert "secret" not in text
    assert text.count("@contextlib.contextmanager") == 1  # the bystander's


def test_a_task_that_is_a_class_is_refused(root, edit):
    edit("chapters/01_sums/chapter.yml", "toy.sums:Tally.add", "toy.sums:Tally")

    with pytest.raises(CourseError, match=r"01\.2: toy\.sums:Tally is a class"):
        stub(root, load_chapters(root)[0], "toy.sums")


def test_code_lines_count_neither_comments_nor_docstrings(root):
    assert [code_lines(root, task) for task in load_chapters(root)[0].tasks] == [1, 3, 3]
