"""Task 10.5: the events of a stream, from the first to [DONE]."""

from __future__ import annotations

import asyncio

import pytest

from minisgl.server.client import Piece
from minisgl.server.config import ServerConfig
from minisgl.server.errors import ApiError
from minisgl.server.replies import ChatReply, CompletionReply
from minisgl.server.service import Service
from minisgl.tokenizer.answer import Completion
from tests.ch10_serving.scene import Sent, run, settled

PROMPT, CACHED = 10, 6


class Speaking:
    """An answer whose pieces are known, each with its number of tokens. `turns`: each comes when one is put there."""

    def __init__(self, *pieces, reason="stop", index=0, turns=None) -> None:
        self.completion = Completion(PROMPT, index, index, cached_tokens=CACHED)
        self.pieces, self.reason, self.turns = list(pieces), reason, turns

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self.pieces:
            raise StopAsyncIteration
        if self.turns:
            await self.turns.get()
        text, tokens = self.pieces.pop(0)
        self.completion.text += text
        self.completion.token_ids += [5] * tokens
        if not self.pieces:
            self.completion.finish_reason = self.reason
            self.completion.error = "it broke" if self.reason == "error" else ""
        return Piece(text, [5] * tokens, [])


def new_service() -> Service:
    return Service(ServerConfig(), "tiny")


def stream(*answers, kind=ChatReply, usage=False, service=None):
    """What is sent, and the service that sent it."""
    service, sent = service or new_service(), Sent()
    run(service._stream(sent, list(answers), kind("tiny", None, False, usage), usage, 0.0))
    return sent, service


def choices(sent, index=0):
    """The choices of all chunks with this index."""
    chunks = [event["choices"] for event in sent.events_sent if event != "[DONE]"]
    return [one for each in chunks for one in each if one["index"] == index]


def text_of(sent, index=0):
    return "".join(one["delta"].get("content", "") for one in choices(sent, index))


def test_a_chat_begins_with_the_role_and_then_comes_the_text():
    sent, _ = stream(Speaking(("Yes", 1), (", we", 2), ("", 1)))
    first, *rest = choices(sent)
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in one["delta"] for one in rest)
    assert text_of(sent) == "Yes, we"


def test_a_completion_has_no_role():
    sent, _ = stream(Speaking(("Yes", 1), (".", 1)), kind=CompletionReply)
    assert [one["text"] for one in choices(sent)] == ["Yes", ".", ""]


@pytest.mark.parametrize("kind", [ChatReply, CompletionReply])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_the_finish_reason_stands_in_the_last_chunk_and_only_there(kind, reason):
    sent, _ = stream(Speaking(("Yes", 1), (".", 1), reason=reason), kind=kind)
    assert [one["finish_reason"] for one in choices(sent)][-1] == reason
    assert {one["finish_reason"] for one in choices(sent)[:-1]} == {None}


@pytest.mark.parametrize("usage", [False, True])
def test_done_comes_once_at_the_very_end_and_closes_the_response(usage):
    sent, _ = stream(Speaking(("Yes", 1)), usage=usage)
    assert sent.events_sent.count("[DONE]") == 1
    assert sent.events_sent[-1] == "[DONE]"
    assert sent.ended, "the client waits for more: [DONE] is sent with last=True"


def test_usage_comes_before_done_in_a_chunk_without_choices():
    sent, _ = stream(Speaking(("Yes", 1), (", we", 2)), usage=True)
    *chunks, last, _ = sent.events_sent
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": PROMPT,
        "completion_tokens": 3,
        "total_tokens": PROMPT + 3,
        "prompt_tokens_details": {"cached_tokens": CACHED},
    }
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks)


def test_usage_comes_only_when_it_is_asked_for():
    sent, _ = stream(Speaking(("Yes", 1)))
    assert all("usage" not in event and event["choices"] for event in sent.events_sent[:-1])


def test_the_prompt_of_two_answers_counts_once_and_so_do_its_cached_tokens():
    sent, _ = stream(Speaking(("a", 1)), Speaking(("b", 2), index=1), usage=True)
    usage = sent.events_sent[-2]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (PROMPT, 3, PROMPT + 3)
    assert usage["prompt_tokens_details"]["cached_tokens"] == CACHED


def test_two_answers_have_a_beginning_and_an_end_each():
    sent, _ = stream(Speaking(("one", 1), (".", 1)), Speaking(("two", 1), reason="length", index=1))
    assert [text_of(sent, i) for i in range(2)] == ["one.", "two"]
    for index, reason in enumerate(["stop", "length"]):
        own = choices(sent, index)
        assert [one["delta"].get("role") for one in own].count("assistant") == 1
        assert own[0]["delta"].get("role") == "assistant"
        assert [one["finish_reason"] for one in own if one["finish_reason"]] == [reason]
        assert own[-1]["finish_reason"] == reason


def test_a_piece_is_sent_before_the_next_one_comes():
    async def main():
        turns, sent = asyncio.Queue(), Sent()
        answer = Speaking(("one", 1), (" two", 1), turns=turns)
        task = asyncio.ensure_future(
            new_service()._stream(sent, [answer], CompletionReply("tiny", None, False), False, 0.0)
        )
        await settled()
        if task.done():
            task.result()
        assert sent.sent == [], "something is sent before there is anything"
        turns.put_nowait(None)
        await settled()
        assert [one["text"] for one in choices(sent)] == ["one"]
        turns.put_nowait(None)
        await task

    run(main())


def test_a_piece_and_the_chunks_around_it_are_sent_in_one_go():
    sent, _ = stream(Speaking(("one", 1), (" two", 1)))
    assert len(sent.sent) == 3, "three calls of live.events: role and text, text and end, [DONE]"


@pytest.mark.parametrize(("reason", "status"), [("error", 500), ("abort", 503)])
def test_an_answer_that_broke_off_is_an_error_and_neither_ended_nor_done(reason, status):
    service, sent = new_service(), Sent()
    reply = CompletionReply("tiny", None, False)
    with pytest.raises(ApiError) as error:
        run(service._stream(sent, [Speaking(("one", 1), ("", 0), reason=reason)], reply, True, 0.0))
    assert error.value.status_code == status
    assert [one["finish_reason"] for one in choices(sent)] == [None]
    assert not sent.ended
    assert not service.metrics.finished


def test_every_token_is_counted_once():
    _, service = stream(Speaking(("a", 1), ("b", 4), ("", 1)), Speaking(("c", 3), index=1))
    metrics = service.metrics
    assert metrics.generation_tokens == 9, "generation_tokens counts the tokens of each piece, those without text too"
    assert (metrics.prompt_tokens, metrics.cached_tokens) == (PROMPT, CACHED), (
        "metrics.ended counts them, once an answer"
    )
    assert dict(metrics.finished) == {"stop": 2}


@pytest.mark.parametrize(
    ("pieces", "times", "total"),
    [
        ([("a", 1), ("bbbb", 4), ("c", 1)], [12.0, 14.0, 14.5], 2.0 + 0.5),  # the first token has none before it
        ([("aaa", 3), ("b", 1)], [12.0, 12.5], 1.0 + 0.5),  # it came at 11.0, and two more by 12.0
    ],
)
def test_the_time_between_tokens_is_that_between_pieces_shared_by_their_tokens(monkeypatch, pieces, times, total):
    now, ticks = [10.0], iter(times)
    monkeypatch.setattr("minisgl.server.service.time.perf_counter", lambda: now[0])

    class Timed(Speaking):
        async def __anext__(self):
            now[0] = next(ticks, now[0])
            return await super().__anext__()

    answer = Timed(*pieces)
    answer.completion.first_token_s = 1.0
    between = stream(answer)[1].metrics.between
    num = sum(tokens for _, tokens in pieces)
    assert sum(between.counts) == num - 1, f"{num} tokens have {num - 1} times between them, not {sum(between.counts)}"
    assert between.sum == pytest.approx(total), (
        f"the stream began at 10.0, the first token came at 11.0, and pieces {pieces} were there at {times}: the times "
        f"between tokens sum to {total}, not {between.sum}"
    )
