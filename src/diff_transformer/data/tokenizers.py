"""Byte-level tokenizers: every text has tokens, and the tokens give the text back exactly."""

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
BYTES = 256


def _characters_of_bytes() -> list[str]:
    """The character that byte-level tokenizers write for each byte (GPT-2's table): itself where it is printable.

    Each token is therefore a string with exactly one character for each of its bytes.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(BYTES, 2 * BYTES))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(BYTES)]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose token i < 256 is the byte i; 256 is the end of a text (also used for padding)."""
    vocabulary = {character: byte for byte, character in enumerate(_characters_of_bytes())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    # Without merges a word is no different from a whole document, so the text need not be split into words.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _wrap(tokenizer)


def train_bpe(documents: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train byte-level byte-pair encoding on `documents`.

    Args:
        documents: the text to learn merges from.
        vocab_size: the number of tokens, with the 256 bytes and the end of text. A corpus that is too small for so
            many merges gives fewer: `len(tokenizer)` is the number that counts.

    Raises:
        ValueError: `vocab_size` leaves no room for a merge, there are no documents, or one is not valid text.
    """
    if vocab_size <= BYTES + 1:
        raise ValueError(f"A BPE vocabulary has more than {BYTES + 1} tokens, got vocab_size={vocab_size}.")
    if not documents:
        raise ValueError("There are no documents to train a tokenizer on.")
    _check_characters(documents)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=_characters_of_bytes(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer=trainer)
    return _wrap(tokenizer)


def encode_documents(tokenizer: PreTrainedTokenizerFast, documents: Sequence[str]) -> list[list[int]]:
    """The tokens of each document, without an end of text. A literal "<|endoftext|>" in a document is plain text.

    Raises:
        ValueError: a document is not valid text.
    """
    _check_characters(documents)
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())  # a copy: the switch below is its state
    backend.encode_special_tokens = True
    encoded: list[list[int]] = []
    for start in range(0, len(documents), 64):  # a few at a time: an encoding takes far more memory than its ids
        batch = backend.encode_batch_fast(list(documents[start : start + 64]), add_special_tokens=False)
        encoded.extend(encoding.ids for encoding in batch)
    return encoded


def bytes_of_tokens(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The number of bytes of text that each token stands for; 0 for special tokens."""
    special = set(tokenizer.all_special_ids)
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return [0 if number in special else len(token) for number, token in enumerate(tokens)]


def _check_characters(documents: Sequence[str]) -> None:
    """Every character has bytes, but for surrogates: halves of a pair, which a Python string can hold on its own."""
    for number, document in enumerate(documents, start=1):
        try:
            document.encode()
        except UnicodeEncodeError as error:
            half = document[error.start]
            raise ValueError(f"Document {number} holds {half!r}, which is not a Unicode character.") from None


def _wrap(tokenizer: Any) -> PreTrainedTokenizerFast:
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        padding_side="left",  # prompts of a batch end together, which is what generation needs
        clean_up_tokenization_spaces=False,  # would change the text
    )
