"""SHA-256 digests of files: in the manifest of a finished folder, and remembered for files that others may change."""

import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from diff_transformer.storage.atomic import atomic_file, files_in
from diff_transformer.storage.files import read_json

MANIFEST = "complete.json"
_BLOCK = 1 << 20  # bytes that are read at a time
_THREADS = min(8, os.cpu_count() or 1)  # hashing releases Python's lock, and more threads do not help a disk
_BATCH = 1000  # files that are hashed before their digests are remembered
_LINE = re.compile(r"(\d{1,20}) (\d{1,20}) (.+) ([0-9a-f]{64})")  # size, time, path, SHA-256
_TEXT: Any = {"encoding": "utf-8", "errors": "surrogateescape", "newline": "\n"}  # as Python has names of files
# A file that was changed so few nanoseconds ago may change again without a new time: file systems' clocks are coarse.
_UNSETTLED = 2_000_000_000

# What tells that a file has not changed: its size in bytes, and the time of its last change in nanoseconds.
Stamp = tuple[int, int]


class Entry(NamedTuple):
    """What a manifest says of a file: its bytes, and the SHA-256 of its content in hexadecimal digits."""

    size: int
    sha256: str | None  # None in a manifest of an earlier version, which had sizes alone


def sizes_in(folder: Path) -> dict[str, int]:
    """The size in bytes of every file in a folder, by its path in it; the manifest itself left out."""
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files_in(folder)}
    sizes.pop(MANIFEST, None)
    return sizes


def digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of some files in a folder, by name."""
    names = list(names)
    with ThreadPoolExecutor(_THREADS) as threads:
        return dict(zip(names, threads.map(lambda name: sha256_of(folder / name), names), strict=True))


def write_manifest(folder: Path, sha256: Mapping[str, str]) -> None:
    """Write the manifest, the last file of a folder, from the digests of all others."""
    entries = {name: {"size": size, "sha256": sha256[name]} for name, size in sizes_in(folder).items()}
    (folder / MANIFEST).write_text(json.dumps({"files": entries}, indent=1), encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Entry]:
    """The manifest of a folder. Raises FileNotFoundError where there is none (the folder is not finished), ValueError
    where it is broken.
    """
    try:
        return {
            name: Entry(entry, None) if isinstance(entry, int) else Entry(entry["size"], entry["sha256"])
            for name, entry in read_json(folder / MANIFEST)["files"].items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} is broken: {error!r}") from None


def why_incomplete(folder: Path) -> str | None:
    """Which file is missing or has another size than the manifest says; None where none is. Reads no content."""
    try:
        for name, entry in read_manifest(folder).items():
            file = folder / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != entry.size:
                return f"{name} has {file.stat().st_size} bytes instead of {entry.size}"
    except FileNotFoundError:
        return f"it has no {MANIFEST}, which is written last"
    except (OSError, ValueError) as error:
        return f"it cannot be read: {' '.join(str(error).split())}"
    return None


def why_changed(folder: Path, names: Iterable[str] | None = None) -> str | None:
    """Which of some files (by default all) no longer holds what it held for the manifest; None where all do.

    Reads each file from beginning to end. Files without a digest in the manifest count as unchanged.
    """
    try:
        expected = {name: entry.sha256 for name, entry in read_manifest(folder).items() if entry.sha256 is not None}
        present = digests(folder, sorted(expected if names is None else expected.keys() & set(names)))
    except (OSError, ValueError) as error:
        return f"it cannot be read: {' '.join(str(error).split())}"
    changed = [name for name, digest in present.items() if digest != expected[name]]
    return f"{changed[0]} does not hold what was written, by its SHA-256" if changed else None


def require_unchanged_weights(folder: Path) -> None:
    """Raise ValueError where a model's weights in a checkpoint no longer hold what was written.

    A folder without a manifest, as that of a finished model, has nothing to compare with.
    """
    if not (folder / MANIFEST).is_file():
        return
    reason = why_changed(folder, (file.name for file in folder.glob("model*.safetensors")))
    if reason is not None:
        raise ValueError(f"The checkpoint {str(folder)!r} is damaged: {reason}.")


def sha256_of(file: str | Path, prefix: bytes = b"") -> str:
    """The SHA-256 of a prefix and a file's content, in hexadecimal digits."""
    digest = hashlib.sha256(prefix)
    with open(file, "rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def file_digests(files: Sequence[str], record: Path) -> list[str]:
    """The SHA-256 of the ending and content of each file, in hexadecimal digits.

    `record` remembers the digests by the absolute paths in `files`, a line for each. What has been hashed before an
    interruption is not hashed again. Where the record cannot be written, nothing is remembered.
    """
    known, lines = _read_record(record)
    stamps = {file: _stamp(file) for file in files}
    digests = {file: known[file][1] for file in files if file in known and known[file][0] == stamps[file]}
    missing = [file for file in files if file not in digests]
    with ThreadPoolExecutor(_THREADS) as threads:
        for start in range(0, len(missing), _BATCH):
            batch, hashed = missing[start : start + _BATCH], []
            try:
                for file, digest in zip(batch, threads.map(_digest, batch), strict=True):
                    digests[file] = digest
                    if _is_settled(file, stamps[file]):
                        known[file] = stamps[file], digest
                        hashed.append(_line(file, stamps[file], digest))
            finally:  # after an interruption, too
                # Somebody else's cache cannot be written, nor a full disk; the text can be read all the same.
                with suppress(OSError):
                    _append(record, hashed)
                    lines += len(hashed)
    if lines > 2 * len(files) and missing:  # most lines are about files as they were
        with (
            suppress(OSError),
            atomic_file(record, concurrent=True) as unfinished,
            unfinished.open("w", **_TEXT) as stream,
        ):
            stream.writelines(_line(file, *known[file]) for file in files if file in known)
    return [digests[file] for file in files]


def _digest(file: str) -> str:
    return sha256_of(file, prefix=os.path.splitext(file)[1].lower().encode())


def _stamp(file: str) -> Stamp:
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns


def _is_settled(file: str, stamp: Stamp) -> bool:
    """Whether what was read is what the stamp stands for, and will be; and whether a line can hold the path."""
    return "\n" not in file and _stamp(file) == stamp and stamp[1] < time.time_ns() - _UNSETTLED


def _read_record(record: Path) -> tuple[dict[str, tuple[Stamp, str]], int]:
    """What is remembered by path, and in how many lines."""
    known: dict[str, tuple[Stamp, str]] = {}
    if not record.is_file():
        return known, 0
    count = 0
    with record.open(**_TEXT) as lines:
        for line in lines:
            count += 1
            fields = _LINE.fullmatch(line.rstrip("\n"))
            if fields is not None:  # else it was cut off by an interruption, or is damaged
                size, changed, path, digest = fields.groups()
                known[path] = (int(size), int(changed)), digest
    return known, count


def _append(record: Path, lines: Sequence[str]) -> None:
    record.parent.mkdir(parents=True, exist_ok=True)
    with record.open("a", **_TEXT) as stream:
        stream.write("\n" if stream.tell() else "")  # ends the line that an interruption cut off
        stream.writelines(lines)


def _line(path: str, stamp: Stamp, digest: str) -> str:
    return f"{stamp[0]} {stamp[1]} {path} {digest}\n"
