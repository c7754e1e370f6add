"""Reads and writes the files of results (JSON with null for NaN), and captures their environment."""

import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from diff_lab.coordinates import NO_COORDINATES
from diff_lab.files import finite
from diff_lab.record import Comparison, Environment, Result, ResultsFile
from diff_transformer.utils.environment import device_name, git_commit, versions
from diff_transformer.utils.files import read_json, write_atomically
from diff_transformer.utils.suggestions import quoted

T = TypeVar("T")


def capture_environment(device: str | None = None) -> Environment:
    """Capture the origin of a results file; `device` is a torch device string, by default the one in use."""
    return Environment(
        command=command_line(),
        device=device_name(device),
        versions=versions(),
        commit=git_commit(),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def capture_results(
    title: str,
    settings: Mapping[str, Any],
    records: Sequence[Result],
    device: str | None = None,
    *,
    comparisons: Sequence[Comparison] = (),
    notes: Sequence[str] = (),
) -> ResultsFile:
    """Join `records` with the environment they were measured in."""
    return ResultsFile(
        **vars(capture_environment(device)),
        title=title,
        settings=dict(settings),
        records=tuple(records),
        comparisons=tuple(comparisons),
        notes=tuple(notes),
    )


def command_line() -> str:
    """Return the command as it can be typed again, without the folder that its program lies in."""
    program = Path(sys.argv[0])
    name = "diff-lab" if program.stem == "__main__" else program.name
    return shlex.join([name, *sys.argv[1:]])


def short_commit(commit: str | None) -> str:
    """Shorten a commit for pages: twelve digits, and "-dirty" if files were changed since."""
    if commit is None:
        return "unknown"
    digits, dirty, _ = commit.partition("-dirty")
    return digits[:12] + dirty


def write_text(path: str | Path, text: str) -> Path:
    """Write UTF-8 text; the old file stays until the new one is complete."""
    path = Path(path)
    write_atomically(path, text, concurrent=True)
    return path


def write_json(path: str | Path, value: Any, *, indent: int | None = 2) -> Path:
    """Write records, mappings, sequences, numbers, tensors and arrays as strict JSON (not finite → null)."""
    plain = finite(json.loads(json.dumps(value, default=_plain)))
    return write_text(path, json.dumps(plain, ensure_ascii=False, allow_nan=False, indent=indent) + "\n")


def _plain(value: Any) -> Any:
    """Turn a value that JSON has no form for into one that it has, at least on the outside."""
    if is_dataclass(value):
        items = ((field, getattr(value, field.name)) for field in fields(value))
        # What most records have none of is not written for each.
        written = ((field, item) for field, item in items if item not in ((), NO_COORDINATES) or item != field.default)
        return {field.name.rstrip("_"): item for field, item in written}
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # tensors and arrays, without importing what they come from
        return value.tolist()
    raise ValueError(f"a results file holds numbers, text, lists and mappings, not {type(value).__name__}")


def read_results(path: str | Path) -> ResultsFile:
    """Read a `results.json`. Raises as `read_record` does."""
    return read_record(path, ResultsFile)


def number_of(value: float | None) -> float:
    """Return a number of a metrics line: null, JSON's form of one that is not finite, is NaN."""
    return math.nan if value is None else float(value)


def read_record(path: str | Path, kind: type[T]) -> T:
    """Read a file that holds one record. Raises FileNotFoundError, or ValueError naming the file and the error."""
    try:
        # Of JSON pydantic takes a list for a tuple without taking a text for a number.
        return TypeAdapter(kind).validate_json(json.dumps(read_json(path)))
    except ValidationError as error:
        raise ValueError(f"{path}: {_sentence(error)}") from None


def _sentence(error: ValidationError) -> str:
    """Describe the first error in a file: its place, the expected value, and the value found."""
    first = error.errors()[0]
    keys = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in first["loc"])
    item = f"the file{''.join(keys)}"
    if first["type"] == "missing":
        return f"{item} is missing"
    if first["type"] == "unexpected_keyword_argument":
        return f"{item} is an unknown key"
    return f"{first['msg'].replace('Input', item, 1)}, got {quoted(first['input'])}"
