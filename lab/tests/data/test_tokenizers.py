"""Tokenizers give every text back."""

import hashlib
import itertools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from diff_lab.data import byte_tokenizer, bytes_of_tokens, encode_documents, tokenizers, train_bpe

WORDS = ["the cat sat on the mat. " * 20, "def cat(mat):\n    return mat\n" * 20, "äöü 日本 " * 5]
TOKENIZERS = {"bytes": byte_tokenizer(), "bpe": train_bpe(WORDS, 280)}


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
@settings(deadline=None)
@given(text=st.text() | st.sampled_from(["", "  a  .\r\n\t!", "<|endoftext|>", "I 'm n't ,", "\x00\ufffd\u0301"]))
def test_round_trip(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    (plain,) = encode_documents(tokenizer, [text])
    assert tokenizer.decode(plain) == text
    sizes = bytes_of_tokens(tokenizer)
    assert sum(sizes[number] for number in plain) == len(text.encode())


def test_tokens_of_the_byte_tokenizer_are_bytes() -> None:
    tokenizer = TOKENIZERS["bytes"]
    assert len(tokenizer) == 257
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 256
    assert tokenizer.encode("aé\n") == list("aé\n".encode())
    assert bytes_of_tokens(tokenizer) == [1] * 256 + [0]


def test_bpe_learns_merges_and_always_the_same_ones() -> None:
    tokenizer = TOKENIZERS["bpe"]
    assert len(tokenizer) == 280
    assert len(tokenizer.encode(WORDS[0])) < len(WORDS[0]) / 2
    assert train_bpe(WORDS, 280).get_vocab() == tokenizer.get_vocab()


GENOME = "".join(random.Random(0).choices("ACGT", k=3 * tokenizers._LONGEST_WORD))


def test_words_without_end_are_trained_on_in_parts() -> None:
    """A merge takes time by the square of a word's length: 200 KB of a genome took as long as 10 MB of its lines."""
    words = "wörd, 12  \n" * 1000
    lines = "\n".join("x" * (tokenizers._LONGEST_WORD - 1) for _ in range(4))
    for text in ("", "a", words, lines, "ab12" * len(GENOME)):
        assert list(tokenizers._without_long_words(text)) == [text]
    for word in (GENOME, "7" * len(GENOME), "=_" * len(GENOME), " \n" * len(GENOME), "日本" * len(GENOME)):
        parts = list(tokenizers._without_long_words(f"{words}{word}{words}"))
        assert "".join(parts) == f"{words}{word}{words}"
        lengths = [len(run) for part in parts for run in tokenizers._IN_ONE_WORD.findall(part)]
        assert max(lengths) < 2 * tokenizers._LONGEST_WORD
    tokenizer = train_bpe([GENOME], 300)
    assert len(tokenizer.encode(GENOME)) < len(GENOME) / 2
    assert tokenizer.decode(tokenizer.encode(GENOME)) == GENOME


def test_text_with_white_space_gives_the_tokens_that_it_always_gave() -> None:
    """The vocabularies that the version before words were cut has made, by their SHA-256."""
    text = "".join(f"word {number * number % 977}, it's\n\n  indented\t" for number in range(20_000))
    vocabulary = json.dumps(train_bpe([text, GENOME[:2000]], 600).get_vocab(), sort_keys=True)
    assert hashlib.sha256(vocabulary.encode()).hexdigest().startswith("cc26c03e83e755ae7a45b8c030d2a267")


def test_ctrl_c_does_not_wait_for_the_training_of_a_tokenizer() -> None:
    goes_on, read = threading.Event(), []

    def documents() -> Iterator[str]:
        yield "to be, or not to be"
        os.kill(os.getpid(), signal.SIGINT)
        goes_on.wait()
        for number in itertools.count():
            read.append(number)
            yield "more"

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        train_bpe(documents(), 300)
    assert read == []
    assert threading.active_count() == before + 1  # what trains, which nobody can interrupt
    goes_on.set()
    end = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert read == [0]  # and it reads no more


def test_the_end_of_text_written_out_in_a_document_is_not_one() -> None:
    for tokenizer in TOKENIZERS.values():
        (ids,) = encode_documents(tokenizer, ["a<|endoftext|>b"])
        assert tokenizer.eos_token_id not in ids
        assert tokenizer.encode("a<|endoftext|>b").count(tokenizer.eos_token_id) == 1  # and it was only looked up


def test_documents_are_neither_cut_nor_padded_as_the_tokenizer_was_last_told(tmp_path: Path) -> None:
    """A tokenizer keeps that, and saves it."""
    used = byte_tokenizer()
    used("a", truncation=True, padding="max_length", max_length=3)
    used.save_pretrained(tmp_path)
    for tokenizer in (used, AutoTokenizer.from_pretrained(tmp_path)):
        assert encode_documents(tokenizer, ["abcd", "a"]) == [list(b"abcd"), list(b"a")]


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_saving_and_loading(kind: str, tmp_path: Path) -> None:
    TOKENIZERS[kind].save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "the cat  <|endoftext|>\n日本."
    assert loaded.encode(text) == TOKENIZERS[kind].encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.eos_token_id == TOKENIZERS[kind].eos_token_id
    assert loaded.padding_side == "left"


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="vocab_size=257"):
        train_bpe(WORDS, 257)
    with pytest.raises(ValueError, match="no documents"):
        train_bpe([], 300)


def test_half_a_pair_is_not_text() -> None:
    documents = ["ab", "\ud800"]
    with pytest.raises(ValueError, match=r"Document 2 holds '\\ud800'"):
        train_bpe(documents, 300)
    with pytest.raises(ValueError, match=r"Document 2 holds '\\ud800'"):
        encode_documents(byte_tokenizer(), documents)
