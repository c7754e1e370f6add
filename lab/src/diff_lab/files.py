"""Reads metrics of runs; finds the folder of caches; says in words that a disk is full."""

import math
import os
from pathlib import Path
from typing import Any

from diff_transformer.utils.files import free_bytes, is_full_disk, parse_json


def finite(value: Any) -> Any:
    """Return a value for JSON, which has neither NaN nor infinity: None takes their place in it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list) else value


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the logged steps of a `metrics.jsonl`, without the half line that a running or killed training leaves.

    Raises FileNotFoundError, or ValueError, which names the line that is not one of metrics.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist")
    *lines, _ = Path(path).read_bytes().split(b"\n")
    return [parse_metrics_line(text, f"{path}, line {number}") for number, text in enumerate(lines, start=1)]


def parse_metrics_line(text: str | bytes, source: str) -> dict[str, Any]:
    """Return the numbers of one line by name, with "step". Raises ValueError that names `source` if it is none."""
    line = parse_json(text, source)
    if not isinstance(line, dict) or not isinstance(line.get("step"), int):
        raise ValueError(f"{source}: expected an object with a whole number 'step'")
    return line


def cache_folder() -> Path:
    """Return the folder of all caches: $DIFF_TRANSFORMER_CACHE, or `diff_transformer` in the user's cache.

    Raises OSError if none is named and the user has no home.
    """
    named = os.environ.get("DIFF_TRANSFORMER_CACHE")
    if named:
        return Path(os.path.expanduser(named))
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diff_transformer"
    except RuntimeError:
        raise OSError(
            "This user has no home folder to keep prepared data in: the environment variable DIFF_TRANSFORMER_CACHE "
            "names another one."
        ) from None


def full_disk(error: BaseException, path: Path) -> str | None:
    """Say that the disk of `path` is full, if an error means that; None for any other."""
    if not is_full_disk(error):
        return None
    reason = " ".join(str(error).split())
    return f"there is no room for it ({reason}); {free_bytes(path) / 1e9:,.3f} GB are free"
