"""Reads JSON, and makes files and folders that have their names only when they are complete, whatever interrupts it.

Each is made in a sibling, reaches the disk, and is then renamed. Names of such siblings begin with a dot:
`.unfinished-X` is being made, and `.replaced-X` is the folder X that the new one replaces.

Python's own library is enough for it: `ops` calls it even if nothing but torch is installed.
"""

import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_UNFINISHED, _REPLACED = ".unfinished-", ".replaced-"
_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


def parse_json(data: str | bytes, source: str) -> Any:
    """Parse JSON; a byte order mark, with which some programs begin a text, may stand before it.

    Raises ValueError with one sentence, which begins with `source`: it is not UTF-8, not JSON, or nested too deep.
    """
    try:
        return json.loads((data if isinstance(data, str) else data.decode("utf-8")).removeprefix("\ufeff"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 text: {error.reason} at byte {error.start}.") from None
    except RecursionError:
        raise ValueError(f"{source} is not JSON that can be read: it holds lists in lists too deep.") from None
    except ValueError as error:  # a number of thousands of digits is one that is no JSONDecodeError
        raise ValueError(f"{source} is not JSON: {error}.") from None


def read_json(path: str | Path) -> Any:
    """Read a JSON file. Raises FileNotFoundError, or ValueError as `parse_json` does, naming the file."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist")
    return parse_json(Path(path).read_bytes(), str(path))


def free_bytes(path: Path) -> int:
    """Return how many bytes the disk has left on which a path is, or would be."""
    existing = next(parent for parent in path.absolute().parents if parent.exists())
    return shutil.disk_usage(existing).free


def is_full_disk(error: BaseException) -> bool:
    """Return whether an error of Python or of a library means that a disk is full."""
    return getattr(error, "errno", None) in _FULL or any(os.strerror(number) in str(error) for number in _FULL)


@contextmanager
def atomic_file(path: Path, *, concurrent: bool = False) -> Iterator[Path]:
    """Yield an empty file to write, which replaces `path` when the block ends, with the permissions of a new file.

    After an error or an interruption `path` stays as it was, and the unfinished file is removed. One that a killed
    process left behind is overwritten by the next attempt. With `concurrent`, several processes may write the file at
    the same time, and the last one wins.
    """
    unfinished = unfinished_path(path)
    if concurrent:
        unfinished = unfinished.with_name(f"{unfinished.name}.{os.getpid()}")
    try:
        unfinished.unlink(missing_ok=True)
        unfinished.touch()
        permissions = stat.S_IMODE(unfinished.stat().st_mode)
        yield unfinished
        _complete(unfinished, permissions)
        os.replace(unfinished, path)
    except BaseException as error:
        unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None and error.strerror:  # of a write, such as a full disk
            raise OSError(f"{str(path)!r} cannot be written: {error.strerror}.") from error
        raise


def write_atomically(path: Path, text: str, *, concurrent: bool = False) -> None:
    """Write text in UTF-8; see `atomic_file`."""
    with atomic_file(path, concurrent=concurrent) as unfinished:
        unfinished.write_text(text, encoding="utf-8", newline="\n")


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yield an empty folder to fill, which gets the name `target` when the block ends, or is removed after an error.

    Raises FileExistsError if there is something at `target`, before or after.
    """
    refuse_existing(target)
    # The process is in the name, as two may make `target` at the same time.
    unfinished = target.with_name(f"{_UNFINISHED}{target.name}-{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a killed process with this number
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
    """Return the sibling in which a file or folder is made that is renamed to `target` at the end."""
    return target.with_name(_UNFINISHED + target.name)


def commit(unfinished: Path, target: Path, *, replace: bool = False) -> None:
    """Rename a filled folder to `target`, once all that it holds has reached the disk.

    Its files get the permissions of new ones. With `replace`, a folder at `target` is moved aside until `clean_up`
    removes it; without, FileExistsError is raised if there is one.
    """
    for file in files_in(unfinished):
        _complete(file, unfinished.stat().st_mode & 0o666)  # as the folder is new, too
    for folder in (unfinished, *(path for path in unfinished.rglob("*") if path.is_dir())):
        flush_names(folder)
    if not replace:
        refuse_existing(target)
    elif target.exists():
        os.replace(target, _replaced_path(target))
    os.replace(unfinished, target)
    for parent in (target.parent, target.parent.parent):  # either may be new
        with suppress(PermissionError):  # a folder that may be entered but not read was not made here
            flush_names(parent)


def clean_up(target: Path) -> None:
    """Remove the leftovers of a killed process beside `target`, and put back the folder that it moved aside."""
    replaced = _replaced_path(target)
    if replaced.exists() and not target.exists():
        os.replace(replaced, target)
    for sibling in (replaced, unfinished_path(target)):
        if sibling.exists():
            shutil.rmtree(sibling)


def present_folders(parent: Path, pattern: str) -> dict[str, Path]:
    """Return folders in `parent` by name: those that match a pattern, and those that a killed process moved aside."""
    moved = {path.name.removeprefix(_REPLACED): path for path in parent.glob(_REPLACED + pattern) if path.is_dir()}
    return moved | {path.name: path for path in parent.glob(pattern) if path.is_dir()}


def clean_up_all(parent: Path, pattern: str) -> None:
    """Call `clean_up` for every target in `parent` beside which killed processes have left something."""
    for prefix in (_UNFINISHED, _REPLACED):
        for path in parent.glob(prefix + pattern):
            clean_up(parent / path.name.removeprefix(prefix))


def files_in(folder: Path) -> list[Path]:
    """Return all files in a folder and in those below it, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flush_names(folder: Path) -> None:
    """Wait until the names in a folder have reached the disk: after something in it was made or moved."""
    if os.name == "posix":  # elsewhere a folder cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _complete(file: Path, permissions: int) -> None:
    """Set a written file's permissions and wait until it has reached the disk."""
    file.chmod(permissions)  # safetensors makes its files for their owner alone
    with file.open("r+b") as stream:
        os.fsync(stream.fileno())  # or a power cut could leave the name without its content


def _replaced_path(target: Path) -> Path:
    return target.with_name(_REPLACED + target.name)
