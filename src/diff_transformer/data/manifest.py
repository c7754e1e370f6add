"""The manifest of a finished folder: every file in it with its size and the SHA-256 of its content."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from diff_transformer.data.disk import files_in
from diff_transformer.files import read_json

MANIFEST = "complete.json"
_BLOCK = 1 << 20  # bytes that are read at a time
_THREADS = 4  # hashing releases Python's lock, so files are read side by side


class Entry(NamedTuple):
    """What is known of a file.

    Attributes:
        size: in bytes.
        sha256: of the content, in hexadecimal; None in a manifest of an earlier version, which had sizes alone.
    """

    size: int
    sha256: str | None


def sizes_in(folder: Path) -> dict[str, int]:
    """The size in bytes of every file in a folder, by its path in it; the manifest itself left out."""
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files_in(folder)}
    sizes.pop(MANIFEST, None)
    return sizes


def digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of some files in a folder, by name.

    Raises:
        OSError: one cannot be read.
    """
    names = list(names)
    with ThreadPoolExecutor(_THREADS) as threads:
        return dict(zip(names, threads.map(lambda name: sha256_of(folder / name), names), strict=True))


def write_manifest(folder: Path, sha256: Mapping[str, str]) -> None:
    """Write the manifest, the last file of a folder, from the digests of all others."""
    entries = {name: {"size": size, "sha256": sha256[name]} for name, size in sizes_in(folder).items()}
    (folder / MANIFEST).write_text(json.dumps({"files": entries}, indent=1), encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Entry]:
    """The manifest of a folder.

    Raises:
        FileNotFoundError: there is none, so the folder is not finished.
        ValueError: it is broken.
    """
    try:
        files = read_json(folder / MANIFEST)["files"].items()
        found = {
            name: Entry(entry, None) if isinstance(entry, int) else Entry(entry["size"], entry["sha256"])
            for name, entry in files
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} is broken: {error!r}") from None
    return found


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
    """Which of some files, all unless given, no longer holds what it held for the manifest; None where all do.

    Reads them whole: not to be asked often of large ones. Files without a digest in the manifest count as unchanged.
    """
    try:
        written = {name: entry.sha256 for name, entry in read_manifest(folder).items() if entry.sha256 is not None}
        found = digests(folder, sorted(written if names is None else written.keys() & set(names)))
    except (OSError, ValueError) as error:
        return f"it cannot be read: {' '.join(str(error).split())}"
    changed = [name for name, digest in found.items() if digest != written[name]]
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
