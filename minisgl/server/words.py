"""What single tokens say, for answers that show them one by one.

A token need not be text: where a character's bytes are spread over several tokens, each of them is bytes only.
"""

from __future__ import annotations

import codecs
import re
from functools import lru_cache
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Words:
    """Bytes and texts of a vocabulary's tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._bytes = {char: byte for byte, char in _alphabet().items()}
        self._byte_level = "Ġ" in tokenizer.get_vocab()
        added = tokenizer.added_tokens_decoder.items()
        self.special = frozenset(token_id for token_id, token in added if token.special)  # which texts leave out
        self.of = lru_cache(maxsize=100_000)(self._of)

    def _of(self, token_id: int) -> tuple[str, bytes]:
        """A token's text, in OpenAI's notation where it is none, and its bytes."""
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:  # the model's vocabulary may be larger than the tokenizer's
            return f"<{token_id}>", b""
        if token_id in self._tokenizer.added_tokens_decoder:
            data = token.encode()
        elif self._byte_level:
            data = bytes(self._bytes[char] for char in token)
        elif byte := _BYTE.fullmatch(token):
            data = bytes([int(byte[1], 16)])
        else:
            data = token.replace("▁", " ").encode()
        try:
            return data.decode(), data
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data


class Offsets:
    """Where in an answer's text each of its tokens begins; in the middle of a character, where that begins."""

    def __init__(self, words: Words) -> None:
        self._words, self._at = words, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, token_id: int) -> int:
        """The place of the next token."""
        place = self._at
        if token_id in self._words.special:
            return place
        begun = self._decoder.getstate()[0]
        text = self._decoder.decode(self._words.of(token_id)[1])
        self._at += len(text)
        if text.startswith("\ufffd"):  # what was begun does not go on here
            place += len(begun.decode("utf-8", "replace"))
        return place


def _alphabet() -> dict[int, str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2): itself, where it can be printed."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printed)
    return {byte: chr(byte) for byte in printed} | {byte: chr(256 + i) for i, byte in enumerate(others)}
