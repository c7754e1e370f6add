"""Reading JSON that other people wrote, with one sentence for what is wrong; the permissions of new files."""

import json
import os
from collections.abc import Iterable
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


def follow_umask(files: Iterable[Path]) -> None:
    """Give files the permissions that new ones get beside them: safetensors makes its files for their owner alone."""
    for file in files:
        fresh = file.with_name(f".{file.name}.{os.getpid()}.new")
        try:
            fresh.touch()
            file.chmod(fresh.stat().st_mode & 0o777)
        finally:
            fresh.unlink(missing_ok=True)
