"""An answer while it comes: ids in, text out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field

from minisgl.core import FinishReason, TokenLogprobs
from minisgl.message.messages import Output
from minisgl.tokenizer.detokenizer import Decoder, IncrementalDetokenizer
from minisgl.tokenizer.stop import StopStrings


@dataclass
class Completion:
    """What became of one prompt. Times are in seconds from its submission."""

    prompt_tokens: int
    request_id: int = 0  # for LLM.abort
    index: int = 0  # which of the n answers to its prompt
    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # an end-of-sequence token included
    finish_reason: FinishReason | None = None  # None while it is being written, or if it was cut off
    error: str = ""  # why, when finish_reason is "error"
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one a token, if asked for
    first_token_s: float = 0.0
    total_s: float = 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first, by the time they took; 0 for a single token."""
        rest = self.total_s - self.first_token_s
        return (len(self.token_ids) - 1) / rest if len(self.token_ids) > 1 else 0.0


class Answer:
    """A completion as it stands. `receive` takes what the engine sends, in no time; `read` makes text of it.

    Args:
        tokenizer: None leaves the text empty.
        stop: strings that end the answer.
    """

    def __init__(self, completion: Completion, tokenizer: Decoder | None, stop: Sequence[str]) -> None:
        self.completion = completion
        self.unread = ""  # text that nobody has fetched
        self.stopped = False  # a stop string came
        self._detokenizer = IncrementalDetokenizer(tokenizer) if tokenizer else None
        self._stop, self._stops = stop, StopStrings(stop)
        self._reason: FinishReason | None = None  # received
        self._num_read, self._submitted = 0, time.perf_counter()

    @property
    def is_open(self) -> bool:
        return self.completion.finish_reason is None

    def receive(self, output: Output, now: float) -> None:
        """Take what the request got, as of now."""
        completion = self.completion
        completion.token_ids += output.tokens
        completion.logprobs += output.logprobs
        completion.total_s = now - self._submitted
        if output.tokens and not completion.first_token_s:
            completion.first_token_s = completion.total_s
        completion.cached_tokens, completion.error = output.cached_tokens, output.error
        self._reason = output.finish_reason

    def read(self) -> None:
        """Bring the completion up to date with what was received: its text, so far as it is certain, and its end. A
        stop string ends it, with the token that completed the string."""
        completion, start = self.completion, self._num_read
        new = completion.token_ids[start:]
        before = (copy(self._detokenizer), copy(self._stops)) if self._stop and len(new) > 1 else None
        text = self._say(new, last=self._reason is not None)
        if self.stopped and before:  # with which of them?
            (self._detokenizer, self._stops), text = before, ""
            for num, token in enumerate(new, 1):
                text += self._say([token], last=self._reason is not None and num == len(new))
                if self.stopped:
                    del completion.token_ids[start + num :], completion.logprobs[start + num :]
                    break
        self._num_read = len(completion.token_ids)
        completion.text += text
        self.unread += text
        completion.finish_reason = "stop" if self.stopped else self._reason

    def fetch(self) -> str:
        """The text that nobody has fetched."""
        text, self.unread = self.unread, ""
        return text

    def _say(self, tokens: list[int], last: bool) -> str:
        if self._detokenizer is None:
            return ""
        text, self.stopped = self._stops.push((self._detokenizer.flush if last else self._detokenizer.push)(tokens))
        return text + self._stops.flush() if last and not self.stopped else text
