"""Makes each folder of prepared data once, under a lock."""

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from diff_transformer.utils.files import commit, full_disk, unfinished_path
from diff_transformer.utils.manifest import digests, sizes_in, why_changed, why_incomplete, write_manifest


def cache_key(*parts: Any) -> str:
    """Return the name of a folder made of these parts, which JSON can hold."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def build_cached(target: Path, make: Callable[[Path], None]) -> Path:
    """Return the folder `target`, made by `make` if it is not there: it is complete or absent.

    One process makes it while others wait. `make` fills a folder that it finds again after an interruption or an
    exception. A damaged folder is made again, with a warning. One whose parent cannot be written, as in somebody else's
    cache, is used if it is complete. Raises OSError if it cannot be written, as on a full disk.
    """
    if _is_verified(target):
        return target
    if target.is_dir() and not os.access(target.parent, os.W_OK):
        if reason := _damage(target):
            raise OSError(f"The cache {str(target)!r} cannot be used, nor written to be made again: {reason}.")
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(target, str(error)) from error
    try:
        with FileLock(f"{target}.lock"):
            if target.is_dir() and (reason := _damage(target)):
                warnings.warn(
                    f"The cache {str(target)!r} is damaged, or of an earlier version, and is made again: {reason}.",
                    stacklevel=2,
                )
                shutil.rmtree(target)
            if not target.is_dir():
                unfinished = unfinished_path(target)
                unfinished.mkdir(exist_ok=True)
                make(unfinished)
                write_manifest(unfinished, digests(unfinished, sizes_in(unfinished)))
                commit(unfinished, target)
            _verified_file(target).write_text(json.dumps(_stamps(target)), encoding="utf-8")
    except Exception as error:
        reason = full_disk(error, target)
        if reason is None:
            raise
        raise _unwritable(target, reason) from error
    return target


def _unwritable(target: Path, reason: str) -> OSError:
    return OSError(
        f"The cache {str(target)!r} cannot be written: {reason}; data.cache or DIFF_TRANSFORMER_CACHE names another "
        "folder."
    )


def _damage(folder: Path) -> str | None:
    """Return why a folder cannot be used, if so. Content is read only if sizes or times of files have changed."""
    return None if _is_verified(folder) else why_incomplete(folder) or why_changed(folder)


def _is_verified(folder: Path) -> bool:
    try:
        return bool(json.loads(_verified_file(folder).read_text(encoding="utf-8")) == _stamps(folder))
    except (OSError, ValueError):
        return False


def _verified_file(folder: Path) -> Path:
    """Return the file beside a folder with the stamps of its files at their last comparison with the manifest."""
    return folder.with_name(f"{folder.name}.verified.json")


def _stamps(folder: Path) -> dict[str, list[int]]:
    """Return size and times of each file, which change with its content, unless the disk fails."""
    statuses = {name: (folder / name).stat() for name in sizes_in(folder)}
    return {name: [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for name, stat in statuses.items()}
