"""Tokens turned into text one after another."""

from dataclasses import dataclass
from typing import Any

from tokenizers.decoders import DecodeStream


@dataclass(frozen=True)
class NewToken:
    """A token of a text, and what it adds to the text."""

    token: int
    text: str
    """Empty while a character has only begun, and for special tokens."""
    offset: int
    """How many characters stand before it."""


class TokenTexts:
    """Reads the tokens of one text in their order; special tokens are left out of the text.

    Args:
        tokenizer: a fast tokenizer of transformers.
        offset: how many characters stand before the first token.
    """

    def __init__(self, tokenizer: Any, offset: int = 0) -> None:
        self._tokenizer = tokenizer._tokenizer
        self._stream = DecodeStream([], skip_special_tokens=True)
        self._offset = offset

    def read(self, token: int) -> NewToken:
        """The next token."""
        text = self._stream.step(self._tokenizer, token) or ""
        read = NewToken(token, text, self._offset)
        self._offset += len(text)
        return read
