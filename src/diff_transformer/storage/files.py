"""What the disk has to be asked: to hold on to what was written, and whether it is full."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any


def parse_json(data: str | bytes, where: str) -> Any:
    """What a piece of JSON holds.

    Args:
        data: the text, or its bytes in UTF-8.
        where: what the message names it by: a file, a line of a file.

    Raises:
        ValueError: one sentence: it is not UTF-8, not JSON, or nested deeper than Python reads.
    """
    try:
        return json.loads(data if isinstance(data, str) else data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text: {error.reason} at byte {error.start}.") from None
    except RecursionError:
        raise ValueError(f"{where} is not JSON that can be read: it holds lists in lists too deep.") from None
    except ValueError as error:  # a number of thousands of digits is one that is no JSONDecodeError
        raise ValueError(f"{where} is not JSON: {error}.") from None


def read_json(path: str | Path) -> Any:
    """What a JSON file holds. Raises FileNotFoundError, or ValueError as `parse_json` does, naming the file."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist")
    return parse_json(Path(path).read_bytes(), str(path))


_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


def files_in(folder: Path) -> list[Path]:
    """All files in a folder and in those below it, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flush(folder: Path) -> None:
    """Wait until a folder and all that it holds have reached the disk, so that no power cut takes them back."""
    for file in files_in(folder):
        with file.open("r+b") as stream:
            os.fsync(stream.fileno())
    for entry in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        flush_names(entry)


def flush_names(folder: Path) -> None:
    """Wait until the names in a folder have reached the disk: after something in it was made or moved."""
    if os.name == "posix":  # elsewhere a folder cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def free_bytes(path: Path) -> int:
    """How many bytes the disk has left on which a path is, or would be."""
    existing = next(parent for parent in path.absolute().parents if parent.exists())
    return shutil.disk_usage(existing).free


def require_space(path: Path, size: int) -> None:
    """Raises OSError, as the system does, where the disk of `path` has less than `size` bytes left."""
    if free_bytes(path) < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_disk(error: BaseException, path: Path, size: int | None = None) -> str | None:
    """In words that the disk of `path` is full, if an error says so; None for any other error.

    Args:
        error: of Python, or of a library that has the system's words in its message.
        path: what cannot be written; it need not exist.
        size: how many bytes it takes, if known.
    """
    reason = " ".join(str(error).split())
    if getattr(error, "errno", None) not in _FULL and not any(os.strerror(number) in reason for number in _FULL):
        return None
    takes = "" if size is None else f"it takes {_readable(size)}, and "
    return f"there is no room for it ({reason}); {takes}{_readable(free_bytes(path))} are free"


def _readable(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"
