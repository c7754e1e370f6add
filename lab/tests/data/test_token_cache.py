"""Tokens prepared once: whole, resumable, found by content."""

import itertools
import multiprocessing
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from diff_lab.data import (
    TextFiles,
    TokenCache,
    byte_tokenizer,
    corpus,
    prepare,
    token_cache,
    train_bpe,
    trained_bpe,
    training_text,
)
from diff_lab.data import prepared_cache as cache_module
from diff_lab.data.corpus import Piece

TOKENIZER = byte_tokenizer()


class Texts:
    """A corpus of pieces at hand; counts how often it is read, and breaks off where it is told to."""

    name = "texts"

    def __init__(self, documents: list[list[str]], breaks_after: int | None = None) -> None:
        self.documents, self.breaks_after, self.read = documents, breaks_after, 0

    def pieces(self, skip: int = 0):  # a generator of pieces
        for parts in self.documents[skip:]:
            for number, part in enumerate(parts, start=1):
                if self.read == self.breaks_after:
                    raise KeyboardInterrupt
                self.read += 1
                yield Piece(part, ends=number == len(parts))

    def fingerprint(self) -> str:
        return repr(self.documents)


def expected(documents: list[list[str]], tokenizer: PreTrainedTokenizerFast = TOKENIZER) -> list[int]:
    texts = ["".join(parts) for parts in documents]
    return [token for text in texts if text for token in [*tokenizer.encode(text), tokenizer.eos_token_id]]


def assert_same(first: TokenCache, second: TokenCache) -> None:
    assert np.array_equal(first.tokens, second.tokens)
    assert np.array_equal(first.documents, second.documents)


DOCUMENTS = [["one"], [""], ["two", " three", " four"], ["five é"], [" six", "\nseven"]]


def test_documents_end_with_the_end_of_text_and_empty_ones_have_no_tokens(tmp_path: Path) -> None:
    cache = prepare(Texts(DOCUMENTS), TOKENIZER, tmp_path)
    assert cache.tokens.tolist() == expected(DOCUMENTS)
    assert cache.tokens.dtype == np.uint16
    lengths = np.diff(cache.documents["end"], prepend=0)
    assert lengths.tolist() == [4, 0, 15, 8, 11]
    assert cache.documents["bytes"].tolist() == [3, 0, 14, 7, 10]
    joined = prepare(Texts([["".join(parts)] for parts in DOCUMENTS]), TOKENIZER, tmp_path)
    assert_same(cache, joined)  # pieces change nothing
    assert len(set(cache.documents["digest"])) == 5


def test_pieces_of_a_file_have_the_tokens_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(f"word {number}, it's\n\n  indented" for number in range(300))
    tokenizer = train_bpe([text], 300)
    (tmp_path / "a.txt").write_text(text)
    monkeypatch.setattr(corpus, "PIECE", 50)
    assert len(list(TextFiles([tmp_path]).pieces())) > 100
    cache = prepare(TextFiles([tmp_path / "a.txt"]), tokenizer, tmp_path / "cache")
    assert cache.tokens.tolist() == expected([[text]], tokenizer)


def test_a_cache_is_found_by_content_and_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "copy.txt").write_text("some text")
    counts: list[tuple[int, int]] = []

    def tell(documents: int, tokens: int) -> None:
        counts.append((documents, tokens))

    prepare(TextFiles([tmp_path / "a.txt"]), TOKENIZER, tmp_path / "cache", tell)
    assert counts == [(1, 10)]
    prepare(TextFiles([tmp_path / "copy.txt"]), TOKENIZER, tmp_path / "cache", tell)
    assert len(counts) == 1
    used = byte_tokenizer()
    used("a", truncation=True, max_length=3)  # which is not how a corpus is tokenised
    prepare(TextFiles([tmp_path / "a.txt"]), used, tmp_path / "cache", tell)
    assert len(counts) == 1
    prepare(TextFiles([tmp_path / "a.txt"]), train_bpe(["some text some text"], 260), tmp_path / "cache", tell)
    assert len(counts) == 2
    # Another vocabulary with the same end of text.
    prepare(TextFiles([tmp_path / "a.txt"]), train_bpe(["some text some text"], 259), tmp_path / "cache", tell)
    assert len(counts) == 3
    (tmp_path / "a.txt").write_text("other text")
    prepare(TextFiles([tmp_path / "a.txt"]), TOKENIZER, tmp_path / "cache", tell)
    assert len(counts) == 4


@pytest.mark.parametrize("breaks_after", range(1, 8))
@pytest.mark.parametrize("torn", [0, 1, 5])
def test_an_interrupted_preparation_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks_after: int, torn: int
) -> None:
    monkeypatch.setattr(token_cache, "_BATCH_CHARACTERS", 1)
    with pytest.raises(KeyboardInterrupt):
        prepare(Texts(DOCUMENTS, breaks_after), TOKENIZER, tmp_path)
    (unfinished,) = (tmp_path / "tokens").glob(".unfinished-*")
    for name in ("tokens.bin", "pieces.bin"):  # what a write that was cut off leaves
        with (unfinished / name).open("ab") as file:
            file.write(b"\x01" * torn)
    again, told = Texts(DOCUMENTS), []
    cache = prepare(again, TOKENIZER, tmp_path, lambda *counts: told.append(counts))
    complete = sum(ends <= breaks_after for ends in itertools.accumulate(map(len, DOCUMENTS)))
    # No document that was complete is read again, but for an empty one that waited for the next to be written.
    assert again.read <= sum(map(len, DOCUMENTS[complete:])) + (breaks_after == 2)
    remaining = list(itertools.chain.from_iterable(DOCUMENTS))[breaks_after:]
    assert len(told) == sum(map(bool, remaining))  # and nothing is encoded twice
    assert_same(cache, prepare(Texts(DOCUMENTS), TOKENIZER, tmp_path / "other"))
    assert not list((tmp_path / "tokens").glob(".unfinished-*"))


def flipped(content: bytes) -> bytes:
    return content[:5] + bytes([content[5] ^ 1]) + content[6:]


@pytest.mark.parametrize("name", ["tokens.bin", "pieces.bin", "cache.json"])
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: content[: len(content) // 2], r" has \d+ bytes instead of \d+"),
        (lambda content: bytes(len(content)), " (has changed since it was written|cannot be read: .* is not JSON)"),
        (flipped, " has changed since it was written"),
        (None, " is missing"),
    ],
    ids=["halved", "zeros", "flipped bit", "deleted"],
)
def test_a_damaged_cache_is_made_again(
    tmp_path: Path, name: str, damage: Callable[[bytes], bytes] | None, reason: str
) -> None:
    prepare(Texts(DOCUMENTS), TOKENIZER, tmp_path)
    (file,) = (tmp_path / "tokens").glob(f"*/{name}")
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage(file.read_bytes()))
    with pytest.warns(UserWarning, match=f"The cache '{file.parent}' is damaged.* and is made again: {name}{reason}"):
        cache = prepare(Texts(DOCUMENTS), TOKENIZER, tmp_path)
    assert cache.tokens.tolist() == expected(DOCUMENTS)
    assert_same(prepare(Texts(DOCUMENTS), TOKENIZER, tmp_path), cache)


def test_a_cache_of_an_earlier_version_is_made_again(tmp_path: Path) -> None:
    """It has no hashes, so nobody knows what it held."""
    prepare(Texts(DOCUMENTS), TOKENIZER, tmp_path)
    (manifest,) = tmp_path.glob("tokens/*/complete.json")
    (stamps,) = tmp_path.glob("tokens/*.verified.json")
    manifest.unlink()
    stamps.unlink()
    with pytest.warns(UserWarning, match=r"made again: it has no complete\.json"):
        prepare(Texts(DOCUMENTS), TOKENIZER, tmp_path)


def test_content_is_read_only_where_sizes_or_times_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[Path] = []
    compare = cache_module.why_changed
    monkeypatch.setattr(cache_module, "why_changed", lambda folder: compared.append(folder) or compare(folder))
    for _ in "12":
        cache = prepare(Texts(DOCUMENTS), TOKENIZER, tmp_path)
    assert not compared
    (tokens,) = tmp_path.glob("tokens/*/tokens.bin")
    os.utime(tokens)
    for _ in "12":
        assert_same(prepare(Texts(DOCUMENTS), TOKENIZER, tmp_path), cache)
    assert compared == [tokens.parent]


def test_all_is_on_the_disk_before_the_cache_is_there(tmp_path: Path, disk: Any) -> None:
    prepare(Texts(DOCUMENTS), TOKENIZER, tmp_path)
    assert [path.parent for path in disk.moved] == [tmp_path / "tokens"]
    assert (tmp_path / "tokens").stat().st_ino in disk.flushed


@pytest.mark.parametrize("size", [10, 60])
def test_a_full_disk_is_told_with_the_folder(tmp_path: Path, size: int) -> None:
    """In the tokens, in the list of pieces; where there is room again, it goes on."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    message = f"The cache '{tmp_path}/tokens/.*' cannot be written: there is no room for it .*File too large.* are free"
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        with pytest.raises(OSError, match=message) as raised:
            prepare(Texts(DOCUMENTS), TOKENIZER, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(raised.value)
    assert prepare(Texts(DOCUMENTS), TOKENIZER, tmp_path).tokens.tolist() == expected(DOCUMENTS)


def test_a_cache_that_cannot_be_made_is_told_with_what_names_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        OSError, match=r"The cache '.*file/cache/tokens/.*' cannot be written: .*DIFF_TRANSFORMER_CACHE"
    ):
        prepare(Texts(DOCUMENTS), TOKENIZER, tmp_path / "file" / "cache")
    for name in ("DIFF_TRANSFORMER_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 987_654)  # a container's user, whom no file knows
    with pytest.raises(OSError, match=r"no home folder .* DIFF_TRANSFORMER_CACHE names another"):
        prepare(Texts(DOCUMENTS), TOKENIZER)


def test_a_list_without_its_tokens_is_cut_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "_BATCH_CHARACTERS", 1)
    with pytest.raises(KeyboardInterrupt):
        prepare(Texts(DOCUMENTS, 5), TOKENIZER, tmp_path)
    (unfinished,) = (tmp_path / "tokens").glob(".unfinished-*")
    os.truncate(unfinished / "tokens.bin", 21)  # a disk that lost power: the list was written, the tokens were not
    assert prepare(Texts(DOCUMENTS), TOKENIZER, tmp_path).tokens.tolist() == expected(DOCUMENTS)


@given(
    st.lists(st.lists(st.text("ab \né", max_size=6), min_size=1, max_size=4), min_size=1, max_size=8),
    st.integers(0, 20),
)
def test_any_corpus_interrupted_anywhere(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[str]], breaks_after: int
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    if not any(part for parts in documents for part in parts):
        with pytest.raises(ValueError, match="empty: texts holds no text"):
            prepare(Texts(documents), TOKENIZER, folder)
        return
    try:
        prepare(Texts(documents, breaks_after), TOKENIZER, folder)
    except KeyboardInterrupt:
        assert breaks_after <= sum(map(len, documents))
    assert prepare(Texts(documents), TOKENIZER, folder).tokens.tolist() == expected(documents)


def _prepare(folder: str, texts: str, counts: object) -> None:
    calls = []
    prepare(TextFiles([texts]), TOKENIZER, Path(folder), lambda documents, tokens: calls.append(tokens))
    counts.put(len(calls))  # type: ignore[attr-defined]


def test_several_processes_prepare_once(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text("text " * 50_000)
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
    unseen = set("abcdefghij") - {piece[-1] for piece in text}
    assert len(unseen) in (1, 2)
    assert not any(token.count(letter) > 1 for token in tokenizer.get_vocab() for letter in unseen - set("owshard"))
    assert trained_bpe(source, 0.2, 300, tmp_path / "cache").get_vocab() == tokenizer.get_vocab()
    assert len(list((tmp_path / "cache" / "tokenizers").glob("*/tokenizer.json"))) == 1


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="empty: texts holds no text"):
        prepare(Texts([[""], [""]]), TOKENIZER, tmp_path)
    endless = byte_tokenizer()
    endless.eos_token = None
    with pytest.raises(ValueError, match="no end-of-text token"):
        prepare(Texts(DOCUMENTS), endless, tmp_path)


def test_a_whole_cache_that_cannot_be_written_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As somebody else's, or one in the image of a container. Its times may be others than when it was made."""
    folder = cache_module.build_cached(
        tmp_path / "tokens" / "key", lambda folder: (folder / "file").write_bytes(b"content")
    )
    os.utime(folder / "file", ns=(1, 1))
    before = sorted(path.name for path in folder.parent.iterdir())
    monkeypatch.setattr(os, "access", lambda *_: False)  # tests may run as root, who may write anywhere
    monkeypatch.setattr(cache_module, "FileLock", None)
    assert cache_module.build_cached(folder, lambda folder: pytest.fail("it is made again")) == folder
    assert sorted(path.name for path in folder.parent.iterdir()) == before
    (folder / "file").write_bytes(b"damaged")
    with pytest.raises(OSError, match=r"cannot be used.*SHA-256"):
        cache_module.build_cached(folder, lambda folder: pytest.fail("it is made again"))
