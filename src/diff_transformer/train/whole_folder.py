"""Folders that are there whole or not at all, whatever happens while they are written.

A folder is filled beside its place and moved there at the end. Names of such siblings begin with a dot:
`.unfinished-X` is being filled, `.replaced-X` is the X before, which made room.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.api import CheckpointException

from diff_transformer.data.disk import flush, flush_names, full_disk, require_space
from diff_transformer.data.manifest import (
    digests,
    read_manifest,
    sizes_in,
    why_changed,
    why_incomplete,
    write_manifest,
)
from diff_transformer.files import read_json
from diff_transformer.train.together import gathered, is_first, own_share, together

_UNFINISHED, _REPLACED = ".unfinished-", ".replaced-"


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
                if room is not None:
                    require_space(target, room)
                unfinished.mkdir(parents=True)
        with together():
            if not unfinished.is_dir():
                raise OSError("this process does not see the folder: all of them must share the file system")
        yield unfinished
        with together():
            if is_first():
                flush(unfinished)
                if target.exists():
                    os.replace(target, replaced)
                os.replace(unfinished, target)
                for entry in (target.parent, target.parent.parent):  # either may be new
                    flush_names(entry)
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
    """Write the manifest, the last file of a folder. Called on every process: each reads its share of the others."""
    with together():
        sizes = sizes_in(folder) if is_first() else {}
    sizes = gathered(sizes)[0]
    with together():
        own = digests(folder, own_share(sizes))
    found = {name: digest for each in gathered(own) for name, digest in each.items()}
    with together():
        if is_first():
            write_manifest(folder, found)


def why_torn(folder: Path) -> str | None:
    """What keeps a sealed folder from being whole; None if it is.

    Looks at the names and sizes of the files, the headers of safetensors and all of JSON, not at every number.
    """
    reason = why_incomplete(folder)
    if reason is not None:
        return reason
    for name in read_manifest(folder):
        file = folder / name
        try:
            if file.suffix == ".json":
                read_json(file)
            if file.suffix == ".safetensors":
                with safe_open(file, "pt"):
                    pass
        except (OSError, ValueError, SafetensorError) as error:
            return f"{name} cannot be read: {' '.join(str(error).split())}"
    return None


def why_damaged(folder: Path) -> str | None:
    """As `why_torn`, and whether each file holds what it held when the folder was sealed.

    Called on every process, as each reads its share of the files; all get the same answer.
    """
    reason, sizes = gathered(_torn_and_sizes(folder) if is_first() else (None, {}))[0]
    if reason is not None:
        return reason
    reasons = gathered(why_changed(folder, own_share(sizes)))
    return next((reason for reason in reasons if reason is not None), None)


def _torn_and_sizes(folder: Path) -> tuple[str | None, dict[str, int]]:
    reason = why_torn(folder)
    return reason, {} if reason else {name: entry.size for name, entry in read_manifest(folder).items()}


def _sibling(prefix: str, target: Path) -> Path:
    return target.with_name(prefix + target.name)


def _failure(target: Path, error: BaseException, room: int | None, intact: str) -> str:
    """The sentence for a user."""
    if isinstance(error, CheckpointException):  # of torch: the errors of all processes
        process, (first, _) = min(error.failures.items())
        error = first if process == 0 else OSError(f"Process {process}: {first}")
    reason = full_disk(error, target, room) or " ".join(str(error).split())
    return f"{str(target)!r} cannot be written: {reason}{intact and '; '}{intact}."
