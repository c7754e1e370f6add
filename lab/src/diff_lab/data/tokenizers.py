"""Makes byte-level tokenizers, for which every text has tokens, and the tokens give the text back exactly."""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from diff_lab.data.batches import grouped
from diff_lab.data.corpus import SPLIT_VERSION, Corpus, training_text
from diff_lab.data.prepared_cache import build_cached, cache_key
from diff_lab.files import cache_folder
from diff_transformer.utils.token_texts import characters_of_bytes, is_byte_level, is_byte_token

END_OF_TEXT = "<|endoftext|>"
_LONGEST_WORD = 1 << 11  # characters of a word in training
# Characters of a part of a document, of parts that are encoded together, and what each part counts for besides.
_PART, _TOGETHER, _OVERHEAD = 1 << 18, 1 << 22, 1 << 10
# Before white space that follows something else: byte-level tokenizers never join the two, so the parts' tokens are
# those of the document.
_CUT = re.compile(r"\S(?=\s)")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer whose token i < 256 is the byte i; 256 is the end of a text (also used for padding)."""
    vocabulary = {character: byte for byte, character in enumerate(characters_of_bytes())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    # Without merges a word is no different from a whole document, so the text need not be split into words.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _wrap(tokenizer)


def train_bpe(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train byte-level byte-pair encoding on `documents`, which are read once.

    `vocab_size` is the number of tokens, with the 256 bytes and the end of text; a small corpus may give fewer.
    """
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    # A merge takes time by the square of a word's length, as in a genome without line ends.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.FixedLength(_LONGEST_WORD)])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=characters_of_bytes(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer=trainer)
    tokenizer.pre_tokenizer = words
    return _wrap(tokenizer)


def trained_bpe(
    corpus: Corpus, validation_fraction: float, vocab_size: int, folder: Path | None = None
) -> PreTrainedTokenizerFast:
    """Train BPE on the corpus without its validation part, once: later calls read it from the cache in `folder`."""
    key = cache_key(SPLIT_VERSION, corpus.fingerprint(), validation_fraction, vocab_size)

    def make(unfinished: Path) -> None:
        train_bpe(training_text(corpus, validation_fraction), vocab_size).save_pretrained(unfinished)

    return PreTrainedTokenizerFast.from_pretrained(build_cached((folder or cache_folder()) / "tokenizers" / key, make))


def encode_documents(tokenizer: PreTrainedTokenizerFast, documents: Sequence[str]) -> list[np.ndarray]:
    """Tokenise each document, without an end of text. A literal "<|endoftext|>" in it is plain text."""
    encoder = plain_text_tokenizer(tokenizer)
    parts = ((number, part) for number, text in enumerate(documents) for part in _parts(text))
    encoded: list[list[np.ndarray]] = [[np.array([], dtype=np.uint32)] for _ in documents]
    # A few at a time: an encoding takes far more memory than its ids.
    for group in grouped(parts, lambda part: _OVERHEAD + len(part[1]), _TOGETHER):
        encodings = encoder.encode_batch_fast([part for _, part in group], add_special_tokens=False)
        for (number, _), encoding in zip(group, encodings, strict=True):
            encoded[number].append(np.array(encoding.ids, dtype=np.uint32))
    return [np.concatenate(ids) for ids in encoded]


def _parts(text: str) -> Iterator[str]:
    """Yield a text in parts, each cut where it changes no token, but where a word is longer than many parts."""
    start = 0
    while len(text) - start > 2 * _PART:
        longest = start + 16 * _PART
        found = _CUT.search(text, start + _PART, longest)
        end = found.end() if found else longest
        yield text[start:end]
        start = end
    yield text[start:]


def plain_text_tokenizer(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """Return a copy of a tokenizer's encoder that neither cuts nor pads, and takes special tokens for plain text."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    return backend


def bytes_of_tokens(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the number of bytes of text that each token stands for; 0 for special tokens.

    Exact for byte-level tokenizers (GPT-2's kind), and nearly for those that write "▁" for a space (Llama's first). A
    tokenizer that drops white space, such as WordPiece, has too few.
    """
    special, byte_level = set(tokenizer.all_special_ids), is_byte_level(tokenizer)

    def size(token: str) -> int:
        return len(token) if byte_level else 1 if is_byte_token(token) else len(token.replace("▁", " ").encode())

    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return [0 if number in special or token is None else size(token) for number, token in enumerate(tokens)]


def _wrap(tokenizer: Any) -> PreTrainedTokenizerFast:
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        padding_side="left",  # prompts of a batch end together, which is what generation needs
        clean_up_tokenization_spaces=False,  # would change the text
    )
