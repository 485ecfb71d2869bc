"""Token ids to text while they arrive, so that the pieces joined equal the decode of all ids.

A token can end in the middle of a character, and a tokenizer may decode a token differently at the start of a text
than after another. So text is held back until its last character is whole, and each piece is decoded together with
the tokens of the piece before it (the two-offset scheme of vLLM and SGLang).
"""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

INCOMPLETE = "\ufffd"  # what a decoder puts where bytes do not form a character


class Decoder(Protocol):
    """The part of a Hugging Face tokenizer that is needed here."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


class IncrementalDetokenizer:
    """Feed ids with `push`, print what it returns, and end with `flush`."""

    def __init__(self, tokenizer: Decoder, skip_special_tokens: bool = True) -> None:
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._context: list[int] = []  # ids of the last piece, already given out
        self._pending: list[int] = []  # ids whose text is still held back

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next ids; return the text that is now certain, often empty."""
        held = len(self._pending)
        self._pending = [*self._pending, *token_ids]
        for end in range(len(self._pending), held, -1):  # the last of several may end in the middle of a character
            text = self._text(end)
            if text and not text.endswith(INCOMPLETE):
                self._context, self._pending = self._pending[:end], self._pending[end:]
                return text
        return ""

    def flush(self, token_ids: Sequence[int] = ()) -> str:
        """Take the last ids; return their text and what is held back: nothing will come that could complete it."""
        self._pending = [*self._pending, *token_ids]
        text = self._text(len(self._pending))
        self._context, self._pending = [], []
        return text

    def _text(self, end: int) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._pending[:end])[len(before) :]
