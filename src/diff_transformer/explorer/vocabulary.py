"""Turns text into tokens and tokens into a page's pieces, and refuses text that is not usable with a sentence."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from diff_transformer.utils.suggestions import did_you_mean, quoted
from diff_transformer.utils.token_texts import TokenNames


class TokenizerVocabulary:
    """A tokenizer of transformers."""

    between = ""  # of the pieces of a text, which are the tokens' own
    note = ""  # a hint on how to write a text

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._names = TokenNames(tokenizer)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text. Raises ValueError, with a sentence, for one that has none."""
        check_text(text)
        return list(self.tokenizer(text)["input_ids"])

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return the text that each token adds."""
        names = self._names.of(tokens)
        return [name or self._own(token) for name, token in zip(names, tokens, strict=True)]

    def piece_after(self, tokens: Sequence[int], token: int) -> str:
        """Return the text that a token adds to others."""
        return self._names.after(tokens, token) or self._own(token)

    def _own(self, token: int) -> str:
        """Return the vocabulary's name of a token that adds nothing."""
        return str(self.tokenizer.convert_ids_to_tokens(token))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        if not tokens:
            return ""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @property
    def words(self) -> dict[str, int]:
        """The tokens by their names."""
        return dict(self.tokenizer.get_vocab())


class WordVocabulary:
    """Words with white space between them, one for each token, for a model without a tokenizer.

    Args:
        words: the word of each token, all different and without white space.
        note: a hint on how to write such a text.
    """

    between = " "

    def __init__(self, words: Sequence[str], note: str = "") -> None:
        self.words, self.note = tuple(words), note
        self._tokens = {word: token for token, word in enumerate(self.words)}

    def encode(self, text: str) -> list[int]:
        check_text(text)
        words = text.split()
        for word in words:
            if word not in self._tokens:
                hint = did_you_mean(word[:40], self.words)
                raise ValueError(
                    f"The model has no token {quoted(word)}: it reads words of {self.words[0]!r} … {self.words[-1]!r}, "
                    f"{len(self.words)} in all, with spaces between them{hint}"
                )
        return [self._tokens[word] for word in words]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(self.pieces(tokens))

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        return [self.words[token] for token in tokens]

    def piece_after(self, tokens: Sequence[int], token: int) -> str:
        # The output layer may have more rows than the task has tokens.
        return self.words[token] if token < len(self.words) else f"#{token}"


Vocabulary: TypeAlias = TokenizerVocabulary | WordVocabulary


def check_text(text: object) -> None:
    """Refuse a value that is no text, and text that is no Unicode, each with a sentence."""
    if not isinstance(text, str):
        raise ValueError(f"text must be a string, got {type(text).__name__}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"The text has half of a surrogate pair at character {error.start + 1}, which is no Unicode."
        ) from None
