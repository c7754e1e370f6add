"""Tokens turned into text one after another."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers.decoders import DecodeStream

_READ_BEFORE = 16  # tokens, more than what decides about a first space


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
        before: the tokens that the text goes on from. Some tokenizers (Llama 2's) leave out the space before the first
            word of a text, which the first word after others keeps.
    """

    def __init__(self, tokenizer: Any, offset: int = 0, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer._tokenizer
        known = list(before[-_READ_BEFORE:])
        if self._tokenizer.decode(known, skip_special_tokens=True).endswith("\ufffd"):
            known = []  # a character has only begun there, and would come again when it is whole
        self._stream = DecodeStream(known, skip_special_tokens=True)
        self._offset = offset

    def read(self, token: int) -> NewToken:
        """The next token."""
        text = self._stream.step(self._tokenizer, token) or ""
        read = NewToken(token, text, self._offset)
        self._offset += len(text)
        return read
