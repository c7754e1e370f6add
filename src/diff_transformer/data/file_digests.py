"""The hashes of files, remembered: a file is read again only where its size or its time of change is another."""

import itertools
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from diff_transformer.data.manifest import sha256_of

_THREADS = min(8, os.cpu_count() or 1)  # hashing holds no lock of Python's; more do not help a disk
_AT_A_TIME = 1000  # files that are handed to the threads together
_LINE = re.compile(r"(\d{1,20}) (\d{1,20}) (.+) ([0-9a-f]{64})")  # size, time, path, SHA-256
_TEXT: Any = {"encoding": "utf-8", "errors": "surrogateescape", "newline": "\n"}  # as Python has names of files
# A file that was changed so few nanoseconds ago may change again without a new time: file systems' clocks are coarse.
_UNSETTLED = 2_000_000_000


class Stamp(NamedTuple):
    """What tells that a file has not changed: bytes, and nanoseconds of its last change."""

    size: int
    changed: int

    @classmethod
    def of(cls, file: str) -> "Stamp":
        found = os.stat(file)
        return cls(found.st_size, found.st_mtime_ns)


def file_digests(files: Sequence[str], record: Path) -> list[str]:
    """The SHA-256 of each file's ending and content, in hexadecimal digits.

    Args:
        files: their whole paths, by which they are remembered.
        record: where the hashes are remembered, a line for a file. What has been hashed before an interruption is not
            hashed again. Where the record cannot be written, nothing is remembered.
    """
    known, lines = _read(record)
    stamps = [Stamp.of(file) for file in files]
    digests: list[str | None] = []
    for file, stamp in zip(files, stamps, strict=True):
        was, digest = known.get(file, (None, None))
        digests.append(digest if was == stamp else None)
    missing = [number for number, digest in enumerate(digests) if digest is None]
    if missing:
        with ThreadPoolExecutor(_THREADS) as pool:
            for some in _batches(missing):
                found: list[str] = []
                try:
                    for number, digest in zip(some, pool.map(_digest, [files[number] for number in some]), strict=True):
                        digests[number] = digest
                        if _is_settled(files[number], stamps[number]):
                            known[files[number]] = stamps[number], digest
                            found.append(_line(files[number], stamps[number], digest))
                finally:  # after an interruption, too
                    # Somebody else's cache cannot be written, nor a full disk; the tokens can be read all the same.
                    with suppress(OSError):
                        _append(record, found)
                        lines += len(found)
        if lines > 2 * len(files):  # most of it is about files as they were
            with suppress(OSError):
                _replace(record, {file: known[file] for file in files if file in known})
    return [digest for digest in digests if digest is not None]


def _digest(file: str) -> str:
    return sha256_of(file, prefix=os.path.splitext(file)[1].lower().encode())


def _is_settled(file: str, stamp: Stamp) -> bool:
    """Whether what was read is what the stamp stands for, and will be; and whether a line can hold the path."""
    return "\n" not in file and Stamp.of(file) == stamp and stamp.changed < time.time_ns() - _UNSETTLED


def _batches(numbers: Sequence[int]) -> Iterator[tuple[int, ...]]:
    rest = iter(numbers)
    while some := tuple(itertools.islice(rest, _AT_A_TIME)):
        yield some


def _append(record: Path, lines: Sequence[str]) -> None:
    record.parent.mkdir(parents=True, exist_ok=True)
    with record.open("a", **_TEXT) as stream:
        stream.write("\n" if stream.tell() else "")  # what an interruption cut off has no end of its line
        stream.writelines(lines)


def _read(record: Path) -> tuple[dict[str, tuple[Stamp, str]], int]:
    """What is remembered by path, and in how many lines."""
    known: dict[str, tuple[Stamp, str]] = {}
    if not record.is_file():
        return known, 0
    count = 0
    with record.open(**_TEXT) as lines:
        for line in lines:
            count += 1
            found = _LINE.fullmatch(line.rstrip("\n"))
            if found is not None:  # else it was cut off by an interruption, or is damaged
                size, changed, path, digest = found.groups()
                known[path] = Stamp(int(size), int(changed)), digest
    return known, count


def _line(path: str, stamp: Stamp, digest: str) -> str:
    return f"{stamp.size} {stamp.changed} {path} {digest}\n"


def _replace(record: Path, known: dict[str, tuple[Stamp, str]]) -> None:
    whole = record.with_name(f".{record.name}-{os.getpid()}")
    try:
        with whole.open("w", **_TEXT) as stream:
            stream.writelines(_line(path, *about) for path, about in known.items())
        os.replace(whole, record)
    finally:
        whole.unlink(missing_ok=True)
