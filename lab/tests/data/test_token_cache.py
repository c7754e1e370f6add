"""Tokens prepared once: whole, resumable, found by content."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from commands import largest_file
from diff_lab.data import TextFiles, byte_tokenizer, prepare, token_cache, train_bpe, trained_bpe
from diff_lab.data.corpus import training_text
from diff_lab.data.token_cache import TokenCache

TOKENIZER = byte_tokenizer()
DOCUMENTS = ["one", "", "two three four", "five é", " six\nseven"]


class Texts:
    """A corpus of documents at hand; counts how many are read, and breaks off where it is told to."""

    name = "texts"

    def __init__(self, texts: list[str], breaks_after: int | None = None) -> None:
        self.texts, self.breaks_after, self.read = texts, breaks_after, 0

    def documents(self, skip: int = 0) -> Iterator[str]:
        for place in range(skip, len(self.texts)):
            if self.read == self.breaks_after:
                raise KeyboardInterrupt
            self.read += 1
            yield self.texts[place]

    def fingerprint(self, anew: bool = False) -> str:
        return repr(self.texts)


@pytest.fixture
def _one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "_BATCH_CHARACTERS", 0)


def expected(texts: list[str], tokenizer: PreTrainedTokenizerFast = TOKENIZER) -> list[int]:
    return [token for text in texts if text for token in [*tokenizer.encode(text), tokenizer.eos_token_id]]


def assert_same(first: TokenCache, second: TokenCache) -> None:
    assert np.array_equal(first.tokens, second.tokens)
    assert np.array_equal(first.documents, second.documents)


@pytest.mark.usefixtures("_one_by_one")
def test_a_text_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    """Else the cache of the old text would hold the new one, or what the next call goes on from would."""
    texts = Texts([*DOCUMENTS])
    with pytest.raises(ValueError, match=r"^texts was changed while it was tokenised"):
        prepare(texts, TOKENIZER, tmp_path, lambda *_: texts.texts.__setitem__(-1, "another"))
    assert prepare(Texts(DOCUMENTS), TOKENIZER, tmp_path).tokens.tolist() == expected(DOCUMENTS)


def test_documents_end_with_the_end_of_text_and_empty_ones_have_no_tokens(tmp_path: Path) -> None:
    cache = prepare(Texts(DOCUMENTS), TOKENIZER, tmp_path)
    assert cache.tokens.tolist() == expected(DOCUMENTS)
    assert cache.tokens.dtype == np.uint16
    assert np.diff(cache.documents["end"], prepend=0).tolist() == [4, 0, 15, 8, 11]
    assert cache.documents["bytes"].tolist() == [3, 0, 14, 7, 10]
    assert len(set(cache.documents["digest"])) == 5
    assert {path.name for path in cache.folder.iterdir()} == {"tokens.bin", "documents.bin", "complete.json"}


def test_a_cache_is_found_by_content_and_tokenizer(tmp_path: Path) -> None:
    for name in ("a.txt", "copy.txt"):
        (tmp_path / name).write_text("some text")
    used = byte_tokenizer()
    used("a", truncation=True, padding="max_length", max_length=3)  # which is not how a corpus is tokenised
    told: list[tuple[int, int]] = []

    def times_made(name: str, tokenizer: PreTrainedTokenizerFast) -> int:
        prepare(TextFiles([tmp_path / name]), tokenizer, tmp_path / "cache", lambda *counts: told.append(counts))
        return len(told)

    assert times_made("a.txt", TOKENIZER) == times_made("copy.txt", TOKENIZER) == times_made("a.txt", used) == 1
    assert told == [(1, 10)]
    # Other vocabularies with the same end of text.
    assert times_made("a.txt", train_bpe(["some text some text"], 260)) == 2
    assert times_made("a.txt", train_bpe(["some text some text"], 259)) == 3
    (tmp_path / "a.txt").write_text("other text")
    assert times_made("a.txt", TOKENIZER) == 4


@pytest.mark.usefixtures("_one_by_one")
@pytest.mark.parametrize("torn", [0, 5])
def test_an_interrupted_preparation_resumes(tmp_path: Path, torn: int) -> None:
    for breaks_after in (1, 2, 4):
        folder = tmp_path / str(breaks_after)
        with pytest.raises(KeyboardInterrupt):
            prepare(Texts(DOCUMENTS, breaks_after), TOKENIZER, folder)
        (unfinished,) = (folder / "tokens").glob(".unfinished-*")
        for name in ("tokens.bin", "documents.bin"):  # what a write that was cut off leaves
            with (unfinished / name).open("ab") as file:
                file.write(b"\x01" * torn)
        again = Texts(DOCUMENTS)
        cache = prepare(again, TOKENIZER, folder)
        assert again.read == len(DOCUMENTS) - breaks_after  # nothing is read twice
        assert_same(cache, prepare(Texts(DOCUMENTS), TOKENIZER, tmp_path / "other"))
        assert not list((folder / "tokens").glob(".unfinished-*"))


@pytest.mark.usefixtures("_one_by_one")
def test_a_list_without_its_tokens_is_cut_back(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        prepare(Texts(DOCUMENTS, 4), TOKENIZER, tmp_path)
    (unfinished,) = (tmp_path / "tokens").glob(".unfinished-*")
    os.truncate(unfinished / "tokens.bin", 21)  # a disk that lost power: the list was written, the tokens were not
    assert prepare(Texts(DOCUMENTS), TOKENIZER, tmp_path).tokens.tolist() == expected(DOCUMENTS)


@given(st.lists(st.text("ab \né", max_size=6), min_size=1, max_size=8), st.integers(0, 10))
def test_any_corpus_interrupted_anywhere(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], breaks_after: int
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    if not any(texts):
        with pytest.raises(ValueError, match="empty: texts holds no text"):
            prepare(Texts(texts), TOKENIZER, folder)
        return
    try:
        prepare(Texts(texts, breaks_after), TOKENIZER, folder)
    except KeyboardInterrupt:
        assert breaks_after <= len(texts)
    assert prepare(Texts(texts), TOKENIZER, folder).tokens.tolist() == expected(texts)


def flip_a_bit(file: Path) -> None:
    """With the time of before, as programs that copy set it."""
    times, content = file.stat(), file.read_bytes()
    file.write_bytes(content[:5] + bytes([content[5] ^ 1]) + content[6:])
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin"])
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda file: os.truncate(file, 9), r" has 9 bytes instead of \d+"),
        (lambda file: flip_a_bit(file), " has changed since it was written"),
        (Path.unlink, " is missing"),
    ],
    ids=["cut off", "flipped bit", "deleted"],
)
def test_a_damaged_cache_is_made_again(
    tmp_path: Path, name: str, damage: Callable[[Path], object], reason: str
) -> None:
    prepare(Texts(DOCUMENTS), TOKENIZER, tmp_path)
    (file,) = (tmp_path / "tokens").glob(f"*/{name}")
    damage(file)
    with pytest.warns(UserWarning, match=f"The cache '{file.parent}' is damaged.* and is made again: {name}{reason}"):
        cache = prepare(Texts(DOCUMENTS), TOKENIZER, tmp_path)
    assert cache.tokens.tolist() == expected(DOCUMENTS)
    assert_same(prepare(Texts(DOCUMENTS), TOKENIZER, tmp_path), cache)


def test_all_is_on_the_disk_before_the_cache_is_there(tmp_path: Path, disk: Any) -> None:
    prepare(Texts(DOCUMENTS), TOKENIZER, tmp_path)
    assert [path.parent for path in disk.moved] == [tmp_path / "tokens"]
    assert (tmp_path / "tokens").stat().st_ino in disk.flushed


@pytest.mark.parametrize("size", [10, 60])
def test_a_full_disk_is_told_with_the_folder(tmp_path: Path, size: int) -> None:
    """In the tokens, in the list of documents; where there is room again, it resumes."""
    message = f"The cache '{tmp_path}/tokens/.*' cannot be written: there is no room for it .*File too large.* are free"
    with largest_file(size), pytest.raises(OSError, match=message) as raised:
        prepare(Texts(DOCUMENTS), TOKENIZER, tmp_path)
    assert "\n" not in str(raised.value)
    assert prepare(Texts(DOCUMENTS), TOKENIZER, tmp_path).tokens.tolist() == expected(DOCUMENTS)


def test_bad_input(tmp_path: Path) -> None:
    endless = byte_tokenizer()
    endless.eos_token = None
    with pytest.raises(ValueError, match=r"^The tokenizer is a ByT5Tokenizer, without the tokenizer\.json"):
        prepare(Texts(DOCUMENTS), ByT5Tokenizer(), tmp_path)
    with pytest.raises(ValueError, match="no end-of-text token"):
        prepare(Texts(DOCUMENTS), endless, tmp_path)
    (tmp_path / "file").touch()
    message = r"The cache '.*file/cache/tokens/.*' cannot be written: .*DIFF_TRANSFORMER_CACHE"
    with pytest.raises(OSError, match=message):
        prepare(Texts(DOCUMENTS), TOKENIZER, tmp_path / "file" / "cache")


def _prepare(folder: str, texts: str, counts: Any) -> None:
    calls: list[int] = []
    prepare(TextFiles([texts]), TOKENIZER, Path(folder), lambda documents, tokens: calls.append(tokens))
    counts.put(len(calls))


def test_several_processes_prepare_once(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("text " * 20_000)
    context = multiprocessing.get_context("fork")
    counts = context.Queue()
    processes = [context.Process(target=_prepare, args=(str(tmp_path / "cache"), str(tmp_path), counts)) for _ in "123"]
    for process in processes:
        process.start()
    calls = sorted(counts.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    assert calls[:2] == [0, 0]
    assert calls[2] > 0


def test_a_tokenizer_is_trained_once_on_the_training_text_alone(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text(f"shared words {'only' * 3}{'abcdefghij'[number] * 40}")
    source = TextFiles([tmp_path])
    text = list(training_text(source, 0.2))
    tokenizer = trained_bpe(source, 0.2, 300, tmp_path / "cache")
    assert tokenizer.get_vocab() == train_bpe(text, 300).get_vocab()
    unseen = set("abcdefghij") - {document[-1] for document in text}
    assert len(unseen) in (1, 2)
    assert not any(token.count(letter) > 1 for token in tokenizer.get_vocab() for letter in unseen - set("owshard"))
    assert trained_bpe(source, 0.2, 300, tmp_path / "cache").get_vocab() == tokenizer.get_vocab()
    assert len(list((tmp_path / "cache" / "tokenizers").glob("*/tokenizer.json"))) == 1
