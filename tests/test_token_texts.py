"""New tokens as text, one after another, as they read behind the prompt; and what tokens are called."""

import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diff_lab.data import byte_tokenizer
from diff_transformer.utils.token_texts import TokenNames, TokenTexts
from tokenizer_kinds import KINDS, bpe_tokenizer, llama_tokenizer

TEXTS = [
    "def f(x):\n    if x:\n        return 1\n\n  \tx",
    "  two  spaces  ",
    "\u3000a\u00a0b\u200c\u200d\u00ad",
    "é ☃ \U0001f600\U0001f600日本 x",
    "a\ufffd",
    "<0xE2> ▁",
]


def read(tokenizer: Any, tokens: Sequence[int], **settings: Any) -> str:
    texts = TokenTexts(tokenizer, **settings)
    return "".join(texts.read(token).text for token in tokens) + texts.rest()


def decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(text=st.sampled_from(TEXTS) | st.text() | st.text(alphabet=" \n\tabx☃é日"), data=st.data())
def test_any_tokens_come_as_decode_gives_them_and_go_on_from_any_place(
    kind: str, text: str, data: st.DataObject
) -> None:
    """Special ones and bytes that are no characters, too, as a model that has learned little writes them."""
    tokenizer = KINDS[kind]()
    written = st.lists(st.integers(0, len(tokenizer) - 1), max_size=12)
    tokens = data.draw(st.just(tokenizer(text)["input_ids"]) | written)
    texts = TokenTexts(tokenizer)
    parts = [texts.read(token) for token in tokens]
    assert "".join(part.text for part in parts) + texts.rest() == decoded(tokenizer, tokens)
    offsets = [part.offset for part in parts]
    assert offsets == sorted(offsets)
    before = tokens[: data.draw(st.integers(0, len(tokens)))]
    known = decoded(tokenizer, before)
    if tokens == tokenizer(text)["input_ids"] and decoded(tokenizer, tokens).startswith(known):  # no character is cut
        assert known + read(tokenizer, tokens[len(before) :], before=before) == decoded(tokenizer, tokens)


def test_a_word_after_others_keeps_its_space() -> None:
    tokenizer = llama_tokenizer()
    prompt, new = tokenizer("be " * 20 + "to")["input_ids"], tokenizer("be to")["input_ids"]
    assert read(tokenizer, new) == "be to"
    assert read(tokenizer, new, before=prompt) == " be to"
    special = [tokenizer.bos_token_id] * 20  # which are not in the text
    assert read(tokenizer, new, before=special) == "be to"


def test_a_character_comes_with_its_last_byte_also_after_a_prompt() -> None:
    assert read(byte_tokenizer(), [*b"b"], before=[*"aé".encode()[:-1]]) == "b"
    assert read(byte_tokenizer(), [*"é".encode()[1:], *b"b"], before=[*"aé".encode()[:-1]]) == "éb"
    assert read(byte_tokenizer(), [*"é!".encode()], before=[*"aé".encode()]) == "é!"
    assert read(byte_tokenizer(), [*"aé".encode()[:-1]]) == "a\ufffd"


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30)
@given(text=st.sampled_from(TEXTS[:-1]) | st.text(alphabet=" \n\tabx☃é日\U0001f600"))
def test_names_are_what_tokens_add_and_the_bytes_of_what_has_only_begun(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]()
    tokens = tokenizer(text)["input_ids"]
    names = TokenNames(tokenizer).of(tokens)
    added = [re.sub("<0x[0-9A-F]{2}>", "", name) for name in names]
    assert "".join(added) == text
    texts = TokenTexts(tokenizer)
    for token, name in zip(tokens, added, strict=True):
        offset = texts.read(token).offset
        # A replacement character is taken for one that has only begun until the next one comes.
        assert text[offset : offset + len(name)] == name or "\ufffd" in text


@pytest.mark.parametrize(
    ("tokenizer", "start"), [(byte_tokenizer(), []), (bpe_tokenizer(), []), (llama_tokenizer(), [""])]
)
def test_bytes_and_special_tokens_have_names(tokenizer: Any, start: list[str]) -> None:
    snow, end = tokenizer("\U0001f600日")["input_ids"], tokenizer.eos_token_id
    names = TokenNames(tokenizer)
    first = ["<0xF0>", "<0x9F>", "<0x98>", "\U0001f600"]
    assert names.of(snow)[: len(start) + 4] == [*start, *first]
    assert names.of(snow)[-1] == "日"
    assert names.of([*snow, end], len(snow)) == [tokenizer.eos_token]
    # The same bytes alone, and behind others that they do not complete.
    byte = snow[len(start) + 1]
    assert names.after([], byte) == names.after(tokenizer("x")["input_ids"], byte) == "<0x9F>"
