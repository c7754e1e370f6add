"""Hashes of files remembered: nothing is read twice, and nothing that changed is missed."""

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from diff_lab.data import TextFiles
from diff_transformer.utils import manifest as module
from diff_transformer.utils.manifest import file_digests

Read = Callable[[], list[str]]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    """The names of the files that were read since the last call."""
    seen: list[str] = []
    digest = module._digest

    def spy(file: str) -> str:
        seen.append(Path(file).name)
        return digest(file)

    monkeypatch.setattr(module, "_digest", spy)

    def since() -> list[str]:
        files = sorted(seen)
        seen.clear()
        return files

    return since


def write(file: Path, text: str, seconds: int) -> str:
    """A file that was changed at a time long ago."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    os.utime(file, (seconds, seconds))
    return str(file)


def expected(file: str) -> str:
    return hashlib.sha256(os.path.splitext(file)[1].encode() + Path(file).read_bytes()).hexdigest()


def test_a_file_is_read_where_its_stamp_is_another(tmp_path: Path, read: Read) -> None:
    files = [write(tmp_path / name, name, 1000) for name in ("a.txt", "b.txt", "c d.jsonl")]
    record = tmp_path / "cache" / "record.txt"
    first = file_digests(files, record)
    assert first == [expected(file) for file in files]
    assert read() == ["a.txt", "b.txt", "c d.jsonl"]
    assert file_digests(files, record) == first
    assert read() == []
    write(tmp_path / "a.txt", "A.txt", 1000)  # neither another size nor another time: not seen, as documented
    write(tmp_path / "b.txt", "B.txt", 1001)
    write(tmp_path / "c d.jsonl", "longer than before", 1000)
    changed = file_digests(files, record)
    assert read() == ["b.txt", "c d.jsonl"]
    assert changed == [first[0], expected(files[1]), expected(files[2])]
    assert file_digests(files[1:], record) == changed[1:]
    assert read() == []


def test_a_file_of_this_moment_is_read_again(tmp_path: Path, read: Read) -> None:
    """Its next change might fall on the same tick of the file system's clock."""
    file = tmp_path / "a.txt"
    file.write_text("one")
    assert file_digests([str(file)], tmp_path / "record.txt") == [expected(str(file))]
    file.write_text("two")
    assert file_digests([str(file)], tmp_path / "record.txt") == [expected(str(file))]
    assert read() == ["a.txt", "a.txt"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 200,
        b'{"a.txt": [1, 2',
        b"[]",
        b'{"a.txt": 1}',
        b'{"a.txt": [1]}',
        b"5 1000000000000 a.txt " + b"a" * 64 + b"\n",  # a line of earlier versions
    ],
)
def test_a_damaged_record_is_as_good_as_none(tmp_path: Path, read: Read, content: bytes) -> None:
    files = [write(tmp_path / name, name, 1000) for name in ("a.txt", "b.txt")]
    record = tmp_path / "record.txt"
    record.write_bytes(content)
    first = file_digests(files, record)
    assert first == [expected(file) for file in files]
    assert read() == ["a.txt", "b.txt"]
    assert file_digests(files, record) == first
    assert read() == []


def test_an_interruption_keeps_what_was_hashed(tmp_path: Path, read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [write(tmp_path / f"{number}.txt", str(number), 1000) for number in range(6)]
    spied = module._digest

    def interrupted(file: str) -> str:
        if file.endswith("4.txt"):
            raise KeyboardInterrupt
        return spied(file)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_digest", interrupted)
        with pytest.raises(KeyboardInterrupt):
            file_digests(files, tmp_path / "record.txt")
    read()
    file_digests(files, tmp_path / "record.txt")
    assert read() == ["4.txt", "5.txt"]


def test_the_record_does_not_grow_with_every_change(tmp_path: Path) -> None:
    record = tmp_path / "record.txt"
    for time in range(20):
        files = [write(tmp_path / name, f"{time}", 1000 + time) for name in ("a.txt", "b.txt")]
        assert file_digests(files, record) == [expected(file) for file in files]
    assert record.read_text().count("a.txt") == 1
    assert not list(tmp_path.glob(".record*"))


def test_where_nothing_can_be_remembered_the_files_are_read(tmp_path: Path, read: Read) -> None:
    files = [write(tmp_path / "a.txt", "a", 1000)]
    (tmp_path / "file").write_text("no folder")
    for _ in range(2):
        assert file_digests(files, tmp_path / "file" / "record.txt") == [expected(files[0])]
    assert read() == ["a.txt", "a.txt"]


def test_a_full_disk_is_no_reason_to_stop(tmp_path: Path, read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [write(tmp_path / name, name, 1000) for name in ("a.txt", "b.txt")]

    def full(*_: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_atomically", full)
        assert file_digests(files, tmp_path / "record.txt") == [expected(file) for file in files]
    file_digests(files, tmp_path / "record.txt")
    write(tmp_path / "a.txt", "longer", 1000)
    monkeypatch.setattr(module, "write_atomically", full)
    for seconds in range(2000, 2010):
        write(tmp_path / "a.txt", "again", seconds)
        assert file_digests(files, tmp_path / "record.txt") == [expected(file) for file in files]


def test_names_of_any_bytes(tmp_path: Path, read: Read) -> None:
    names = ["a b.txt", "a\nb.txt", os.fsdecode(b"\xff.txt")]
    files = [write(tmp_path / name, "text", 1000) for name in names]
    first = file_digests(files, tmp_path / "record.txt")
    read()
    assert file_digests(files, tmp_path / "record.txt") == first
    assert read() == []


def test_a_corpus_remembers_in_its_cache(tmp_path: Path, read: Read) -> None:
    write(tmp_path / "text" / "a.txt", "one", 1000)
    write(tmp_path / "text" / "deeper" / "b.txt", "two", 1000)
    corpus = TextFiles([tmp_path / "text"], cache=tmp_path / "cache")
    print_of = corpus.fingerprint()
    assert read() == ["a.txt", "b.txt"]
    assert TextFiles([tmp_path / "text"], cache=tmp_path / "cache").fingerprint() == print_of
    assert read() == []
    write(tmp_path / "text" / "a.txt", "one", 2000)  # touched: read, and the content is what it was
    assert corpus.fingerprint() == print_of
    assert read() == ["a.txt"]
    write(tmp_path / "text" / "a.txt", "One", 3000)
    assert corpus.fingerprint() != print_of
