"""Reads JSON and the metrics of a run, and says whether the disk is full."""

import errno
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


def parse_json(data: str | bytes, where: str) -> Any:
    """What a piece of JSON holds.

    Raises ValueError with one sentence, which begins with `where`: it is not UTF-8, not JSON, or nested too deep.
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


def finite(value: Any) -> Any:
    """A value for JSON, which has neither NaN nor infinity: None takes their place in it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list) else value


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The logged steps of a `metrics.jsonl`, without the half line that a running or killed training leaves.

    Raises FileNotFoundError, or ValueError, which names the line that is not one of metrics.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        *lines, _ = Path(path).read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}.") from None
    return [parse_metrics_line(text, f"{path}, line {number}") for number, text in enumerate(lines, start=1)]


def parse_metrics_line(text: str | bytes, where: str) -> dict[str, Any]:
    """The numbers of one line by name, "step" among them. Raises ValueError, which names `where`, if it is none."""
    line = parse_json(text, where)
    if not isinstance(line, dict) or not isinstance(line.get("step"), int):
        raise ValueError(f"{where}: expected an object with a whole number 'step'")
    return line


def free_bytes(path: Path) -> int:
    """How many bytes the disk has left on which a path is, or would be."""
    existing = next(parent for parent in path.absolute().parents if parent.exists())
    return shutil.disk_usage(existing).free


def require_space(path: Path, size: int) -> None:
    """Raises OSError, as the system does, where the disk of `path` has less than `size` bytes left."""
    if free_bytes(path) < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_disk(error: BaseException, path: Path, size: int | None = None) -> str | None:
    """Say that the disk of `path` is full, where an error of Python or of a library means that; None for any other.

    `size` is how many bytes the file or folder takes, if known.
    """
    reason = " ".join(str(error).split())
    if getattr(error, "errno", None) not in _FULL and not any(os.strerror(number) in reason for number in _FULL):
        return None
    takes = "" if size is None else f"it takes {_readable(size)}, and "
    return f"there is no room for it ({reason}); {takes}{_readable(free_bytes(path))} are free"


def _readable(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"
