"""Makes each folder of prepared data once, under a lock."""

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from diff_lab.files import full_disk
from diff_transformer.utils.files import commit, unfinished_path
from diff_transformer.utils.manifest import MANIFEST, digests, sizes_in, why_changed, why_incomplete, write_manifest

_UNWRITABLE = "The cache {!r} cannot be written: {}; data.cache or DIFF_TRANSFORMER_CACHE names another folder."


def cache_key(*parts: Any) -> str:
    """Return the name of a folder made of these parts, which JSON can hold."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def build_cached(target: Path, make: Callable[[Path], None]) -> Path:
    """Return the folder `target`, made by `make` if it is not there: it is complete or absent.

    One process makes it while others wait. `make` fills a folder that it finds again after an interruption or an
    exception. A damaged folder is made again, with a warning. Raises OSError if it cannot be written, as on a full disk
    or in somebody else's cache.
    """
    if _damage(target) is None:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{target}.lock").acquire()
    except OSError as error:
        raise OSError(_UNWRITABLE.format(str(target), error)) from error
    try:
        with lock:
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
    except Exception as error:
        reason = full_disk(error, target)
        if reason is None:
            raise
        raise OSError(_UNWRITABLE.format(str(target), reason)) from error
    return target


def _damage(folder: Path) -> str | None:
    """Return why a folder cannot be used, if so. Content is read only if a file may have changed after the manifest."""
    if (reason := why_incomplete(folder)) is not None:
        return reason
    # By the time that no program can set.
    written, *others = ((folder / name).stat().st_ctime_ns for name in (MANIFEST, *sizes_in(folder)))
    return why_changed(folder) if max(others) >= written else None
