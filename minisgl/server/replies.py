"""Answers as OpenAI's API words them: whole bodies, and the chunks of streams.

The types are for the API's schema; at run time these are plain dicts, which msgspec writes: there are many.
"""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from typing_extensions import NotRequired, TypedDict

from minisgl.core import FinishReason, TokenLogprobs
from minisgl.server.words import Offsets, Words
from minisgl.tokenizer.answer import Completion

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
LOWEST = -9999.0  # for minus infinity, which JSON has not got; as OpenAI's

Reason = Literal["stop", "length"]


def frame(data: object) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(data) + b"\n\n"


class CachedTokens(TypedDict):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class Usage(TypedDict):
    """Numbers of tokens; a prompt counts once, however many answers it got."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(TypedDict):
    """One entry a token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Reason | None


class CompletionBody(TypedDict):
    """The answer of /v1/completions; its chunks have the same form."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class ChatToken(TypedDict):
    """A token that might have come here."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenChatToken(ChatToken):
    """The token that came, and those that might have."""

    top_logprobs: list[ChatToken]


class ChatLogprobs(TypedDict):
    """One entry a token."""

    content: list[ChosenChatToken]
    refusal: None


class AssistantMessage(TypedDict):
    """What the model said."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Reason


class ChatBody(TypedDict):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class GeneratedToken(TypedDict):
    """A token's logprob, and those of the most probable ones, by their ids."""

    token_id: int
    logprob: float
    top: dict[str, float]


class Generated(TypedDict):
    """One answer of /generate, or what it got since the chunk before."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[GeneratedToken] | None
    finish_reason: Reason | None


class GenerateBody(TypedDict):
    """The answer of /generate; its chunks have the same form, without usage but for the last."""

    id: str
    choices: list[Generated]
    usage: NotRequired[Usage]


def usage(completions: Sequence[Completion]) -> Usage:
    """Of all answers to a request."""
    firsts = [completion for completion in completions if completion.index == 0]  # one a prompt
    prompt = sum(completion.prompt_tokens for completion in firsts)
    answer = sum(len(completion.token_ids) for completion in completions)
    cached = sum(completion.cached_tokens for completion in firsts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class CompletionReply:
    """Words the answers of one request to /v1/completions."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(self, model: str, words: Words, with_logprobs: bool, null_usage: bool = False) -> None:
        self._words, self._with_logprobs = words, with_logprobs
        self.id = self.prefix + uuid.uuid4().hex
        self._head = {"id": self.id, "object": self.kind, "created": int(time.time()), "model": model}
        self._chunk = self._head | {"object": self.chunk_kind} | ({"usage": None} if null_usage else {})
        self._offsets = defaultdict[int, Offsets](lambda: Offsets(words))

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The body."""
        choices = [self.choice(i, completion) for i, completion in enumerate(completions)]
        return self._head | {"choices": choices, "usage": usage(completions)}

    def chunk(self, choice: dict[str, Any]) -> bytes:
        return frame(self._chunk | {"choices": [choice]})

    def opening(self, index: int) -> bytes:
        """What comes before the first piece."""
        return b""

    def piece(self, index: int, text: str, token_ids: list[int], logprobs: Sequence[TokenLogprobs]) -> bytes:
        """What came since the piece before."""
        return self.chunk(self._choice(index, text, logprobs, None))

    def ending(self, index: int, reason: FinishReason | None) -> bytes:
        """The end of one answer."""
        return self.chunk(self._choice(index, "", [], reason))

    def closing(self, completions: Sequence[Completion]) -> bytes:
        """The usage, after all answers."""
        return frame(self._chunk | {"choices": [], "usage": usage(completions)})

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        return self._choice(index, completion.text, completion.logprobs, completion.finish_reason)

    def _choice(
        self, index: int, text: str, logprobs: Sequence[TokenLogprobs], reason: FinishReason | None
    ) -> dict[str, Any]:
        shown = self.logprobs(index, logprobs) if self._with_logprobs else None
        return {"index": index, "text": text, "logprobs": shown, "finish_reason": reason}

    def logprobs(self, index: int, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        of, offsets = self._words.of, self._offsets[index]
        return {
            "tokens": [of(token.token_id)[0] for token in logprobs],
            "token_logprobs": [max(token.logprob, LOWEST) for token in logprobs],
            "top_logprobs": [{of(i)[0]: max(p, LOWEST) for i, p in token.top.items()} for token in logprobs],
            "text_offset": [offsets.next(token.token_id) for token in logprobs],
        }


class ChatReply(CompletionReply):
    """Words the answers of one request to /v1/chat/completions."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def opening(self, index: int) -> bytes:
        return self._delta(index, {"role": "assistant", "content": ""}, [], None)

    def piece(self, index: int, text: str, token_ids: list[int], logprobs: Sequence[TokenLogprobs]) -> bytes:
        return self._delta(index, {"content": text}, logprobs, None)

    def ending(self, index: int, reason: FinishReason | None) -> bytes:
        return self._delta(index, {}, [], reason)

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": self.logprobs(index, completion.logprobs) if self._with_logprobs else None,
            "finish_reason": completion.finish_reason,
        }

    def _delta(
        self, index: int, delta: dict[str, str], logprobs: Sequence[TokenLogprobs], reason: FinishReason | None
    ) -> bytes:
        shown = self.logprobs(index, logprobs) if logprobs and self._with_logprobs else None
        return self.chunk({"index": index, "delta": delta, "logprobs": shown, "finish_reason": reason})

    def logprobs(self, index: int, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        content = [
            self._token(token.token_id, token.logprob)
            | {"top_logprobs": [self._token(i, logprob) for i, logprob in token.top.items()]}
            for token in logprobs
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, data = self._words.of(token_id)
        return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(data)}


class GenerateReply(CompletionReply):
    """Words the answers of one request to /generate."""

    prefix = "gen-"

    def __init__(self, model: str, words: Words, with_logprobs: bool) -> None:
        super().__init__(model, words, with_logprobs)
        self._head = self._chunk = {"id": self.id}

    def piece(self, index: int, text: str, token_ids: list[int], logprobs: Sequence[TokenLogprobs]) -> bytes:
        return self.chunk(self._choice(index, text, logprobs, None) | {"token_ids": token_ids})

    def ending(self, index: int, reason: FinishReason | None) -> bytes:
        return self.chunk(self._choice(index, "", [], reason) | {"token_ids": []})

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        return super().choice(index, completion) | {"token_ids": completion.token_ids}

    def logprobs(self, index: int, logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:  # type: ignore[override]
        return [
            {
                "token_id": token.token_id,
                "logprob": max(token.logprob, LOWEST),
                "top": {str(i): max(logprob, LOWEST) for i, logprob in token.top.items()},
            }
            for token in logprobs
        ]
