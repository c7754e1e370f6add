"""Turns tokens into text: the text that each token adds, and its name on a page or in a list of tokens.

A token alone does not say it: Llama 2's kind of tokenizer leaves out the space before a text's first word, and a
character may have several tokens. The library tokenizers reads tokens one by one too (``DecodeStream``), but raises an
error at bytes that are no character, as a model may write them, and drops those that a text ends with.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

# Tokens: more than what decides about a first space, or belongs to one character.
READ_BEFORE = 16
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


class NewToken(NamedTuple):
    """A token of a text, and the text that it adds."""

    token: int
    text: str
    """Empty while a character has only begun, and for special tokens."""
    offset: int
    """How many characters stand before it."""


class TokenTexts:
    """Reads the tokens of one text in their order; special tokens are left out of the text.

    All that is read, and the `rest`, equals the result of `decode`.

    Args:
        tokenizer: one of transformers.
        offset: how many characters stand before the first token.
        before: the tokens that the text goes on from, behind which a first word keeps its space.
    """

    def __init__(self, tokenizer: Any, offset: int = 0, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._offset = self._last = offset  # of the text that is not handed on yet, and of the last token
        first = max(0, len(before) - READ_BEFORE)
        while first and is_byte_token(_name(tokenizer, before[first])):
            first -= 1  # bytes beside each other are read together
        self._tokens = list(before[first:])
        self._old = len(self._tokens)  # of the tokens, how many are before the text that is not handed on yet
        self._shown = self._text = decoded(tokenizer, self._tokens)
        self._is_open = False  # whether further tokens may change the end of the text

    def read(self, token: int) -> NewToken:
        """Return the next token."""
        begun = len(_gained(self._shown, self._text).rstrip(_REPLACEMENT))
        self._last = max(self._last, self._offset + begun)  # text that turns out to be unreadable may be shorter
        self._tokens.append(token)
        text = decoded(self._tokenizer, self._tokens)
        if text != self._text:  # else it is a special token, which says nothing of the characters before it
            self._text = text
            # Where bytes have tokens of their own, one that is wrong makes all those beside it unreadable.
            self._is_open = text.endswith(_REPLACEMENT) or is_byte_token(_name(self._tokenizer, token))
        return NewToken(token, "" if self._is_open else self.rest(), self._last)

    def rest(self) -> str:
        """Return the text that was held back, as the end of the text."""
        new = _gained(self._shown, self._text)
        if new:
            self._offset += len(new)
            self._tokens = self._tokens[self._old :]
            self._old = len(self._tokens)
            self._shown = self._text = decoded(self._tokenizer, self._tokens)
        self._is_open = False
        return new


class TokenNames:
    """Names tokens by the text that they add; the parts of a character that has only begun by their bytes (<0xE2>), and
    special tokens by their own names."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._bytes = {character: byte for byte, character in enumerate(characters_of_bytes())}
        self._is_byte_level = is_byte_level(tokenizer)

    def of(self, tokens: Sequence[int], first: int = 0) -> list[str]:
        """Return the names of a text's tokens, or of those from the `first` on."""
        return [
            self.after(tokens[max(0, place - READ_BEFORE) : place], tokens[place])
            for place in range(first, len(tokens))
        ]

    def after(self, before: Sequence[int], token: int) -> str:
        """Return the name of a token behind others, of which the last READ_BEFORE count; empty if it adds nothing."""
        own = self._bytes_of(token)
        if own is None:
            known = list(before[-READ_BEFORE:])
            whole = decoded(self._tokenizer, [*known, token])
            gained = _gained(decoded(self._tokenizer, known), whole)
            return gained or str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))
        begun = b""
        for other in reversed(before[-3:]):  # a character has four bytes at most
            if (earlier := self._bytes_of(other)) is None:
                break
            begun = earlier + begun
        # Bytes that are no character, or not yet, become surrogates, which no text has.
        gained = _gained(*(data.decode(errors="surrogateescape") for data in (begun, begun + own)))
        return re.sub("[\udc80-\udcff]", lambda found: f"<0x{ord(found[0]) - 0xDC00:02X}>", gained)

    def _bytes_of(self, token: int) -> bytes | None:
        """Return the bytes of a token that stands for bytes and not characters, else None."""
        name = _name(self._tokenizer, token)
        if self._is_byte_level:
            # Added tokens are written as they are.
            return bytes(map(self._bytes.__getitem__, name)) if self._bytes.keys() >= set(name) else name.encode()
        return bytes.fromhex(name[3:5]) if is_byte_token(name) else None


def characters_of_bytes() -> list[str]:
    """Return the one character that byte-level tokenizers write for each byte (GPT-2's table)."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # not before a tokenizer is there

    return [character for _, character in sorted(bytes_to_unicode().items())]


def is_byte_level(tokenizer: Any) -> bool:
    """Return whether a tokenizer of transformers is of GPT-2's kind, whose tokens are strings of bytes."""
    # There is one decoder, or several in a sequence.
    return "ByteLevel(" in repr(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None))


def is_byte_token(name: str) -> bool:
    """Return whether it is the name of a byte, to which tokenizers of Llama 2's kind fall back."""
    return _BYTE_TOKEN.fullmatch(name) is not None


def decoded(tokenizer: Any, tokens: list[int]) -> str:
    """Return the text of tokens, without special ones and with its spaces as they are."""
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _name(tokenizer: Any, token: int) -> str:
    return tokenizer.convert_ids_to_tokens(token) or ""  # a model may have more tokens than its tokenizer


def _gained(start: str, whole: str) -> str:
    if whole.startswith(start):
        return whole[len(start) :]
    return whole[next(place for place, letter in enumerate(start) if letter != whole[place : place + 1]) :]
