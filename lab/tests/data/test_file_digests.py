"""Hashes of files remembered: nothing is read twice, and nothing that changed is missed."""

import hashlib
import os
from pathlib import Path

import pytest

from diff_lab.data import TextFiles
from diff_transformer.utils.manifest import file_digests


def write(file: Path, text: str, seconds: int) -> str:
    """Write a file that was changed at a time long ago."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    os.utime(file, (seconds, seconds))
    return str(file)


def expected(file: str) -> str:
    return hashlib.sha256(os.path.splitext(file)[1].encode() + Path(file).read_bytes()).hexdigest()


def is_remembered(file: str, record: Path) -> bool:
    """Tell whether a file is not read: other content of the same size and time is not seen, as documented."""
    before, stat = expected(file), os.stat(file)
    Path(file).write_bytes(Path(file).read_bytes().swapcase())
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return file_digests([file], record) == [before]


def test_a_file_is_read_where_its_stamp_is_another(tmp_path: Path) -> None:
    names = ("a.txt", "b.txt", "c d.jsonl", "e\nf.txt", os.fsdecode(b"\xff.txt"))
    files = [write(tmp_path / name, "text", 1000) for name in names]
    record = tmp_path / "cache" / "record.txt"
    first = file_digests(files, record)
    assert first == [expected(file) for file in files]
    write(tmp_path / "b.txt", "TEXT", 1001)
    write(tmp_path / "c d.jsonl", "longer than before", 1000)
    changed = file_digests(files, record)
    assert changed == [first[0], expected(files[1]), expected(files[2]), *first[3:]]
    assert changed[1] != first[1]
    assert all(is_remembered(file, record) for file in files)
    for time in range(20):
        file_digests([write(tmp_path / "a.txt", "text", 2000 + time)], record)
    assert record.read_text().count("a.txt") == 1  # it does not grow with every change
    assert not list(record.parent.glob(".record*"))


def test_a_file_of_this_moment_is_read_again(tmp_path: Path) -> None:
    """Its next change might fall on the same tick of the file system's clock."""
    file = tmp_path / "a.txt"
    file.write_text("one")
    assert file_digests([str(file)], tmp_path / "record.txt") == [expected(str(file))]
    assert not is_remembered(str(file), tmp_path / "record.txt")


@pytest.mark.parametrize("content", [b"", b"\0" * 200, b'{"a.txt": [1, 2', b"[]", b'{"a.txt": 1}', b'{"a.txt": [1]}'])
def test_a_damaged_record_is_as_good_as_none(tmp_path: Path, content: bytes) -> None:
    files = [write(tmp_path / name, name, 1000) for name in ("a.txt", "b.txt")]
    record = tmp_path / "record.txt"
    record.write_bytes(content)
    assert file_digests(files, record) == [expected(file) for file in files]
    assert all(is_remembered(file, record) for file in files)


def test_an_error_keeps_what_was_hashed_and_nothing_need_be_remembered(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "a", 1000)
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(IsADirectoryError):
        file_digests([file, str(tmp_path / "folder.txt")], tmp_path / "record.txt")
    assert is_remembered(file, tmp_path / "record.txt")
    (tmp_path / "file").write_text("no folder")
    assert file_digests([file], tmp_path / "file" / "record.txt") == [expected(file)]


def test_a_corpus_remembers_in_its_cache(tmp_path: Path) -> None:
    write(tmp_path / "text" / "a.txt", "one", 1000)
    write(tmp_path / "text" / "deeper" / "b.txt", "two", 1000)
    corpus = TextFiles([tmp_path / "text"], cache=tmp_path / "cache")
    print_of = corpus.fingerprint()
    write(tmp_path / "text" / "a.txt", "One", 1000)  # the same size and time: not read
    assert corpus.fingerprint() == print_of
    write(tmp_path / "text" / "a.txt", "one", 2000)  # touched: read, and the content is what it was
    assert corpus.fingerprint() == print_of
    write(tmp_path / "text" / "a.txt", "One", 3000)
    assert corpus.fingerprint() != print_of
