"""What `minisgl bench ladder` compares; no speed is tested here."""

from __future__ import annotations

import argparse

import pytest

from benchmarks import ladder


@pytest.fixture(scope="module")
def results(tiny_folder):
    """One round of every chapter's engine."""
    args = argparse.Namespace(
        model=str(tiny_folder), device="cpu", dtype="float32", kernels="torch", requests=9, batch=4, max_tokens=8,
        naive_requests=1,
    )  # fmt: skip
    return {chapter: [ladder.run(chapter, args)] for chapter in ladder.ON_A_CPU}


def test_every_eight_requests_have_answers_of_the_same_lengths():
    lengths = [n for _, n in ladder.workload(24, most=48)]
    assert sorted(lengths[:8]) == sorted(lengths[8:16]) == sorted(lengths[16:]) == [6, 12, 18, 24, 30, 36, 42, 48]
    assert lengths[:8] != sorted(lengths[:8])


def test_the_chats_share_two_system_prompts_and_no_two_are_equal():
    chats = [chat for chat, _ in ladder.workload(24, most=48)]
    assert len({chat[0]["content"] for chat in chats}) == 2
    assert len({(chat[0]["content"], chat[1]["content"]) for chat in chats}) == 24


def test_every_engine_writes_the_same_tokens(results):
    assert ladder.agreement(results) == 1
    assert [len(result["tokens"]) for [result] in results.values()] == [1, 2, 9, 9, 9]


def test_one_other_token_is_noticed(results):
    other = {chapter: [dict(result) for result in rounds] for chapter, rounds in results.items()}
    other[2][0]["tokens"] = [[*other[2][0]["tokens"][0][:-1], -1], *other[2][0]["tokens"][1:]]
    assert ladder.agreement(other) == 0


def test_each_chapter_saves_the_work_that_it_is_about(results):
    work = {chapter: ladder.summary(chapter, rounds)["per_output_token"] for chapter, rounds in results.items()}
    assert work[2]["tokens_computed"] < work[1]["tokens_computed"]  # nothing is computed twice
    assert work[3]["steps"] < work[2]["steps"]  # one reading of the weights serves many
    assert work[4]["tokens_computed"] < work[3]["tokens_computed"]  # a prefix is found
    assert work[5]["steps"] < work[4]["steps"]  # nobody waits for the longest answer
