"""Tables of documents: made once, mapped by all, and the batches of a seed and a step are what they always were."""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest

from diff_lab.data import TextBatches, TextFiles, byte_tokenizer, prepare, text_batches


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    lines = [json.dumps({"text": f"document {number}: " + "é word " * (number * 7 % 23)}) for number in range(40)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    (folder / "b.txt").write_text("  ")
    (folder / "c.txt").write_text("one more\n" * 30)
    return folder


def batches(path: Path, fraction: float, cache: Path) -> TextBatches:
    tokenizer = byte_tokenizer()
    corpus = TextFiles([path])
    return TextBatches(
        prepare(corpus, tokenizer, cache), tokenizer, length=16, batch_size=3, seed=5, validation_fraction=fraction
    )


# What the version before tables were mapped made of the same text.
@pytest.mark.parametrize(
    ("name", "fraction", "content", "source", "print_of"),
    [
        ("", 0.1, "c55abb9a84d288ddb00f19b2c26e30b7", "5018523bd8e83240459de8ed265a4bf2", "90c33c2cba5f3158"),
        ("c.txt", 0.2, "97c18affe88d6467ab3047ec47ef73e9", "6cf84d44f9b608f2213121365c68a86d", "dd3027be3a31cd65"),
    ],
    ids=["documents", "one document that is cut"],
)
def test_batches_are_what_they_always_were(
    text: Path, tmp_path: Path, name: str, fraction: float, content: str, source: str, print_of: str
) -> None:
    assert TextFiles([text / name]).fingerprint().startswith(print_of)
    for _ in "12":  # made, and found
        data = batches(text / name, fraction, tmp_path / "cache")
        digest = hashlib.sha256()
        for batch in [*(data.train_batch(step) for step in range(1, 300)), *data.validation_batches()]:
            for key in sorted(batch):
                digest.update(batch[key].numpy().tobytes())
        assert digest.hexdigest().startswith(content)
        assert data.source.startswith(source)


def test_tables_are_built_once_and_mapped(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = batches(text, 0.1, tmp_path / "cache")
    monkeypatch.setattr(text_batches, "_parts", None)  # would be called to make them
    second = batches(text, 0.1, tmp_path / "cache")
    for packed in (second._train, second._validation):
        assert isinstance(packed.begins, np.memmap)
        assert isinstance(packed.ends, np.memmap)
    assert np.array_equal(first._train.ends, second._train.ends)
    assert first.source == second.source


def test_another_fraction_has_tables_of_its_own(text: Path, tmp_path: Path) -> None:
    sizes = {batches(text, fraction, tmp_path / "cache").train_tokens for fraction in (0.1, 0.3, 0.1, 1)}
    assert len(sizes) == 3
    assert 0 in sizes
    assert len([path for path in (tmp_path / "cache" / "tables").iterdir() if path.is_dir()]) == 3


def test_a_cache_of_before_there_were_tables_is_used(text: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    prepared = prepare(TextFiles([text]), byte_tokenizer(), cache)
    assert not (cache / "tables").exists()
    assert {path.name for path in prepared.folder.iterdir()} == {
        "tokens.bin",
        "pieces.bin",
        "cache.json",
        "complete.json",
    }
    assert batches(text, 0.1, cache).train_tokens == 4074


@pytest.mark.parametrize("name", ["training-ends.npy", "validation-begins.npy", "source.sha256"])
def test_tables_that_are_damaged_are_made_again(text: Path, tmp_path: Path, name: str) -> None:
    first = batches(text, 0.1, tmp_path / "cache")
    (file,) = (tmp_path / "cache" / "tables").rglob(name)
    if file.suffix == ".npy":
        os.truncate(file, file.stat().st_size - 1)
    else:
        file.unlink()
    with pytest.warns(UserWarning, match="damaged"):
        second = batches(text, 0.1, tmp_path / "cache")
    assert (second.source, second.train_tokens) == (first.source, first.train_tokens)
    assert file.is_file()
