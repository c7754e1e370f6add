"""Folders that are there whole or not at all, whatever happens while they are written.

A folder is filled beside its place and moved there at the end. Names of such siblings begin with a dot:
`.unfinished-X` is being filled, `.replaced-X` is the X before, which made room.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.api import CheckpointException

from diff_transformer.train.together import is_first, together

_MANIFEST = "complete.json"
_UNFINISHED, _REPLACED = ".unfinished-", ".replaced-"
_FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


@contextmanager
def written_whole(target: Path, *, room: int | None = None, intact: str = "") -> Iterator[Path]:
    """A new folder to fill, that takes the place of `target` at the end. Called on every process.

    What it holds has reached the disk before it is moved there, so that no power cut leaves half of it. If anything
    goes wrong, `target` stays as it was and nothing else is left behind. An error inside must be one of all processes,
    see `together`.

    Args:
        target: the folder to be; it may exist. All processes must see the same file system there.
        room: how many bytes will be written, if known: refused before anything is written where the disk lacks them.
        intact: what the user still has if this fails, as the end of the message.

    Raises:
        OSError: the folder cannot be written; one sentence that says which, why, and what is intact.
    """
    unfinished, replaced = _sibling(_UNFINISHED, target), _sibling(_REPLACED, target)
    try:
        with together():
            if is_first():
                clean_up(target)
                _require_room(target, room)
                unfinished.mkdir(parents=True)
        with together():
            if not unfinished.is_dir():
                raise OSError("this process does not see the folder: all of them must share the file system")
        yield unfinished
        with together():
            if is_first():
                _flush(unfinished)
                if target.exists():
                    os.replace(target, replaced)
                os.replace(unfinished, target)
                for entry in (target.parent, target.parent.parent):  # either may be new
                    _flush_entry(entry)
    except BaseException as error:
        if is_first():
            clean_up(target)
        if isinstance(error, (OSError, SafetensorError, CheckpointException)):
            raise OSError(_failure(target, error, room, intact)) from error
        raise
    with together():
        if is_first():
            clean_up(target)


def clean_up(target: Path) -> None:
    """Remove what a process that was killed left beside `target`, and put back what it had moved away.

    Called by the first process alone, and only where no other is writing.
    """
    replaced = _sibling(_REPLACED, target)
    if replaced.exists() and not target.exists():
        os.replace(replaced, target)
    for left in (replaced, _sibling(_UNFINISHED, target)):
        if left.exists():
            shutil.rmtree(left)


def candidates(parent: Path, pattern: str) -> dict[str, Path]:
    """Folders in `parent` by name: those that match a pattern, and those that a killed process had moved away."""
    moved = {path.name.removeprefix(_REPLACED): path for path in parent.glob(_REPLACED + pattern) if path.is_dir()}
    return moved | {path.name: path for path in parent.glob(pattern) if path.is_dir()}


def left_behind(parent: Path, pattern: str) -> set[Path]:
    """The targets in `parent` that killed processes may have left something beside."""
    found = [(prefix, path) for prefix in (_UNFINISHED, _REPLACED) for path in parent.glob(prefix + pattern)]
    return {parent / path.name.removeprefix(prefix) for prefix, path in found}


def seal(folder: Path) -> None:
    """Write the manifest, the last file of a folder: every other file with its size in bytes."""
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in _files(folder)}
    (folder / _MANIFEST).write_text(json.dumps({"files": sizes}, indent=1), encoding="utf-8")


def why_torn(folder: Path) -> str | None:
    """What keeps a sealed folder from being whole; None if it is.

    Looks at the names and sizes of the files, the headers of safetensors and all of JSON, not at every number.
    """
    try:
        sizes = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))["files"]
        for name, size in sizes.items():
            file = folder / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != size:
                return f"{name} has {file.stat().st_size} bytes instead of {size}"
            if file.suffix == ".json":
                json.loads(file.read_text(encoding="utf-8"))
            if file.suffix == ".safetensors":
                with safe_open(file, "pt"):
                    pass
    except FileNotFoundError:
        return f"it has no {_MANIFEST}, which is written last"
    except (OSError, ValueError, TypeError, KeyError, AttributeError, SafetensorError) as error:
        return f"it cannot be read: {' '.join(str(error).split())}"
    return None


def _sibling(prefix: str, target: Path) -> Path:
    return target.with_name(prefix + target.name)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _require_room(target: Path, room: int | None) -> None:
    if room is not None and shutil.disk_usage(_existing_parent(target)).free < room:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _failure(target: Path, error: BaseException, room: int | None, intact: str) -> str:
    """The sentence for a user."""
    if isinstance(error, CheckpointException):  # of torch: the errors of all processes
        process, (first, _) = min(error.failures.items())
        error = first if process == 0 else OSError(f"Process {process}: {first}")
    reason = " ".join(str(error).split())
    if getattr(error, "errno", None) in _FULL or any(os.strerror(number) in reason for number in _FULL):
        free = f"{_readable(shutil.disk_usage(_existing_parent(target)).free)} are free"
        numbers = free if room is None else f"it takes {_readable(room)}, and {free}"
        reason = f"there is no room for it ({reason}); {numbers}"
    return f"{str(target)!r} cannot be written: {reason}{intact and '; '}{intact}."


def _readable(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"


def _existing_parent(path: Path) -> Path:
    return next(parent for parent in path.absolute().parents if parent.exists())


def _flush(folder: Path) -> None:
    """Wait until files and folders have reached the disk."""
    for file in _files(folder):
        with file.open("r+b") as stream:
            os.fsync(stream.fileno())
    for entry in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        _flush_entry(entry)


def _flush_entry(folder: Path) -> None:
    if os.name == "posix":  # elsewhere a folder cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
