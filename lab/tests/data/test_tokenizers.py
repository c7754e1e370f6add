"""Tokenizers give every text back."""

import hashlib
import json
import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from diff_lab.data import byte_tokenizer, tokenizers, train_bpe
from diff_lab.data.tokenizers import bytes_of_tokens, encode_documents

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
    assert tokenizer.decode(plain.tolist()) == text
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


def test_words_without_end_do_not_take_quadratic_time() -> None:
    """200 KB of a genome took as long as 10 MB of its lines; other text has the vocabulary that it always had."""
    genome = "".join(random.Random(0).choices("ACGT", k=100_000))
    begin = time.monotonic()
    tokenizer = train_bpe([genome], 300)
    assert time.monotonic() - begin < 60
    assert len(tokenizer.encode(genome)) < len(genome) / 2
    assert tokenizer.decode(tokenizer.encode(genome)) == genome
    text = "".join(f"word {number * number % 977}, it's\n\n  indented\t" for number in range(20_000))
    genome = "".join(random.Random(0).choices("ACGT", k=3 << 11))
    vocabulary = json.dumps(train_bpe([text, genome[:2000]], 600).get_vocab(), sort_keys=True)
    assert hashlib.sha256(vocabulary.encode()).hexdigest().startswith("cc26c03e83e755ae7a45b8c030d2a267")


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_long_document_has_the_tokens_of_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is encoded in parts; where there is no place to cut, tokens of bytes alone are the same."""
    monkeypatch.setattr(tokenizers, "_PART", 100)
    text = " ".join(f"the cät  sat{number}" for number in range(200)) + "\n" + "x" * 200 + " end "
    assert encode_documents(TOKENIZERS[kind], [text, "", text])[2].tolist() == TOKENIZERS[kind].encode(text)
    assert bytes(encode_documents(TOKENIZERS["bytes"], ["y" * 5000])[0].tolist()) == b"y" * 5000


def test_the_end_of_text_written_out_in_a_document_is_not_one() -> None:
    for tokenizer in TOKENIZERS.values():
        (ids,) = encode_documents(tokenizer, ["a<|endoftext|>b"])
        assert tokenizer.eos_token_id not in ids
        assert tokenizer.encode("a<|endoftext|>b").count(tokenizer.eos_token_id) == 1  # and it was only looked up


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_saving_and_loading(kind: str, tmp_path: Path) -> None:
    TOKENIZERS[kind].save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "the cat  <|endoftext|>\n日本."
    assert loaded.encode(text) == TOKENIZERS[kind].encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.eos_token_id == TOKENIZERS[kind].eos_token_id
    assert loaded.padding_side == "left"
