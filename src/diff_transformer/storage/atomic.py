"""Files and folders that appear under their names only when they are complete, whatever interrupts their making.

Each is made in a sibling, reaches the disk, and is then renamed. Names of such siblings begin with a dot:
`.unfinished-X` is being made, and `.replaced-X` is the folder X that the new one replaces.
"""

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from diff_transformer.storage.files import files_in, flush, flush_names

_UNFINISHED, _REPLACED = ".unfinished-", ".replaced-"


@contextmanager
def atomic_file(path: Path, *, concurrent: bool = False) -> Iterator[Path]:
    """An empty file to write, which takes the place of `path` when the block ends, with the permissions of a new file.

    After an error or an interruption `path` stays as it was, and the unfinished file is removed. One that a killed
    process left behind is overwritten by the next attempt.

    Args:
        path: the file to be; it may exist.
        concurrent: whether several processes may write the file at the same time, the last of which wins.

    Raises:
        OSError: the file cannot be written.
    """
    unfinished = unfinished_path(path)
    if concurrent:
        unfinished = unfinished.with_name(f"{unfinished.name}.{os.getpid()}")
    try:
        unfinished.unlink(missing_ok=True)
        unfinished.touch()
        permissions = stat.S_IMODE(unfinished.stat().st_mode)
        yield unfinished
        unfinished.chmod(permissions)  # safetensors makes its files for their owner alone
        with unfinished.open("r+b") as stream:
            os.fsync(stream.fileno())  # or a power cut could leave the name without its content
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, text: str, *, concurrent: bool = False) -> None:
    """Write text in UTF-8; see `atomic_file`."""
    with atomic_file(path, concurrent=concurrent) as unfinished:
        unfinished.write_text(text, encoding="utf-8", newline="\n")


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """An empty folder to fill, which gets the name `target` when the block ends, or is removed after an error.

    Raises:
        FileExistsError: there is something at `target`, before or after.
        OSError: the folder cannot be written.
    """
    refuse_existing(target)
    # The process is in the name: an interrupted making of `target` that is to go on may have the name without it.
    unfinished = target.with_name(f"{_UNFINISHED}{target.name}-{os.getpid()}")
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        commit(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def refuse_existing(target: Path) -> None:
    """Raise FileExistsError if there is something at `target`."""
    if target.exists() or target.is_symlink():
        raise FileExistsError(f"{str(target)!r} exists already; name a folder that does not.")


def unfinished_path(target: Path) -> Path:
    """The sibling in which a file or folder is made that is renamed to `target` at the end."""
    return target.with_name(_UNFINISHED + target.name)


def commit(unfinished: Path, target: Path, *, replace: bool = False) -> None:
    """Rename a filled folder to `target`, once all that it holds has reached the disk.

    Its files get the permissions of new ones. A folder that is replaced is moved aside until `clean_up` removes it.

    Args:
        unfinished: the folder, on the file system of `target`.
        target: the folder to be.
        replace: whether it may exist.

    Raises:
        FileExistsError: `target` exists and is not to be replaced.
    """
    _follow_umask(unfinished)
    flush(unfinished)
    if not replace:
        refuse_existing(target)
    elif target.exists():
        os.replace(target, _replaced_path(target))
    os.replace(unfinished, target)
    for parent in (target.parent, target.parent.parent):  # either may be new
        with suppress(PermissionError):  # a folder that may be entered but not read was not made here
            flush_names(parent)


def clean_up(target: Path) -> None:
    """Remove what a making of `target` left beside it when it ended or was killed, and put back what it moved aside.

    Only to be called where no process is making `target`.
    """
    replaced = _replaced_path(target)
    if replaced.exists() and not target.exists():
        os.replace(replaced, target)
    for sibling in (replaced, unfinished_path(target)):
        if sibling.exists():
            shutil.rmtree(sibling)


def present_folders(parent: Path, pattern: str) -> dict[str, Path]:
    """Folders in `parent` by name: those that match a pattern, and those that a killed process had moved aside."""
    moved = {path.name.removeprefix(_REPLACED): path for path in parent.glob(_REPLACED + pattern) if path.is_dir()}
    return moved | {path.name: path for path in parent.glob(pattern) if path.is_dir()}


def stale_paths(parent: Path, pattern: str) -> set[Path]:
    """The targets in `parent` beside which killed processes may have left something for `clean_up`."""
    siblings = [(prefix, path) for prefix in (_UNFINISHED, _REPLACED) for path in parent.glob(prefix + pattern)]
    return {parent / path.name.removeprefix(prefix) for prefix, path in siblings}


def _follow_umask(folder: Path) -> None:
    """Give all files in a folder the permissions of new ones: safetensors makes its files for their owner alone."""
    fresh = folder / f".new-{os.getpid()}"
    try:
        fresh.touch()
        permissions = fresh.stat().st_mode
    finally:
        fresh.unlink(missing_ok=True)
    for file in files_in(folder):
        file.chmod(stat.S_IMODE(permissions))


def _replaced_path(target: Path) -> Path:
    return target.with_name(_REPLACED + target.name)
