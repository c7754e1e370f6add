"""Computes SHA-256 digests, and writes and reads the manifest of a folder."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors import SafetensorError, safe_open

from diff_transformer.utils.files import files_in, read_json

MANIFEST = "complete.json"
_BLOCK = 1 << 20  # bytes that are read at a time
THREADS = min(8, os.cpu_count() or 1)  # hashing releases Python's lock, and more threads do not help a disk


def sizes_in(folder: Path) -> dict[str, int]:
    """Return the size in bytes of every file in a folder, by its path in it; the manifest itself left out."""
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files_in(folder)}
    sizes.pop(MANIFEST, None)
    return sizes


def digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of some files in a folder, by name."""
    names = list(names)
    with ThreadPoolExecutor(THREADS) as threads:
        return dict(zip(names, threads.map(lambda name: sha256_of(folder / name), names), strict=True))


def write_manifest(folder: Path, sha256: Mapping[str, str]) -> None:
    """Write the manifest, the last file of a folder, from the digests of all others."""
    entries = {name: {"size": size, "sha256": sha256[name]} for name, size in sizes_in(folder).items()}
    (folder / MANIFEST).write_text(json.dumps({"files": entries}, indent=1), encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, tuple[int, str | None]]:
    """Return size and SHA-256 of each file by a folder's manifest; earlier versions wrote no SHA-256.

    Raises FileNotFoundError if there is none, as the folder is not finished, and ValueError if it is broken.
    """
    try:
        return {
            name: (entry, None) if isinstance(entry, int) else (entry["size"], entry["sha256"])
            for name, entry in read_json(folder / MANIFEST)["files"].items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} is broken: {error!r}") from None


def why_incomplete(folder: Path) -> str | None:
    """Name a file that is missing, has another size than the manifest says, or does not begin as JSON or safetensors.

    None if none is. Reads no weights.
    """
    name = MANIFEST
    try:
        for name, (size, _) in read_manifest(folder).items():
            file = folder / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != size:
                return f"{name} has {file.stat().st_size} bytes instead of {size}"
            if file.suffix == ".json":
                read_json(file)
            if file.suffix == ".safetensors":
                with safe_open(file, "pt"):
                    pass
    except FileNotFoundError:
        return f"it has no {MANIFEST}, which is written last"
    except (OSError, ValueError, SafetensorError) as error:
        return f"{name} cannot be read: {' '.join(str(error).split()).rstrip('.')}"
    return None


def why_changed(folder: Path, names: Iterable[str] | None = None) -> str | None:
    """Name one of some files (by default all) whose content differs from the manifest's digest; None if none does.

    Reads each file from beginning to end. Files without a digest in the manifest count as unchanged.
    """
    try:
        expected = {name: sha256 for name, (_, sha256) in read_manifest(folder).items() if sha256 is not None}
        present = digests(folder, sorted(expected if names is None else expected.keys() & set(names)))
    except (OSError, ValueError) as error:
        return f"it cannot be read: {' '.join(str(error).split())}"
    changed = [name for name, digest in present.items() if digest != expected[name]]
    return f"{changed[0]} has changed since it was written, by its SHA-256" if changed else None


def require_unchanged_weights(folder: Path) -> None:
    """Raise ValueError if a model's weights in a checkpoint have changed since they were written."""
    if (folder / MANIFEST).is_file():  # a finished model's folder has none, so nothing to compare with
        reason = why_changed(folder, (file.name for file in folder.glob("model*.safetensors")))
        if reason is not None:
            raise ValueError(f"The checkpoint {str(folder)!r} is damaged: {reason}.")


def sha256_of(file: str | Path, prefix: bytes = b"") -> str:
    """Return the SHA-256 of a prefix and a file's content, in hexadecimal digits."""
    digest = hashlib.sha256(prefix)
    with open(file, "rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
