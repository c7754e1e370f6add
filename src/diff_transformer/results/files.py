"""Records as files, and back.

Files are JSON without NaN: a number that is not finite is written as null and read back as NaN. Every file is written
under a temporary name and then renamed, so that a reader never sees half of one.
"""

import json
import math
import os
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from diff_transformer.files import parse_json, read_json
from diff_transformer.results.records import AttentionExample, ResultsFile, Samples

T = TypeVar("T")


def write_text(path: str | Path, text: str) -> Path:
    """Write UTF-8 text under a temporary name, then rename: the old file stays whole until the new one is."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def write_json(path: str | Path, value: Any, *, indent: int | None = 2) -> Path:
    """Write records, mappings, sequences, numbers, tensors and arrays as strict JSON (not finite → null)."""
    return write_text(path, json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, indent=indent) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if is_dataclass(value):
        found = {field: getattr(value, field.name) for field in fields(value)}
        # What most records have none of is not written for each.
        kept = {field: item for field, item in found.items() if item != () or field.default != ()}
        return {field.name.rstrip("_"): _plain(item) for field, item in kept.items()}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # tensors and arrays, without importing what they come from
        return _plain(value.tolist())
    raise ValueError(f"a results file holds numbers, text, lists and mappings, not {type(value).__name__}")


def read_results(path: str | Path) -> ResultsFile:
    """Read a `results.json`. Raises FileNotFoundError, or ValueError naming the file and what is wrong in it."""
    return _read_record(path, ResultsFile)


def read_attention(path: str | Path) -> AttentionExample:
    """Read an `attention.json`. Raises as `read_results` does."""
    return _read_record(path, AttentionExample)


def read_samples(path: str | Path) -> Samples:
    """Read a `samples.json`. Raises as `read_results` does."""
    return _read_record(path, Samples)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read a `metrics.jsonl`: a dict per logged step, without the half line that a running training is writing."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        *whole, _ = Path(path).read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}.") from None
    return [parse_metrics_line(text, f"{path}, line {number}") for number, text in enumerate(whole, start=1)]


def parse_metrics_line(text: str, where: str) -> dict[str, Any]:
    """A line of a `metrics.jsonl`, which lies `where`. Raises ValueError if it is none."""
    line = parse_json(text, where)
    if not isinstance(line, dict) or not isinstance(line.get("step"), int):
        raise ValueError(f"{where}: expected an object with a whole number 'step'")
    return line


def number_of(value: float | None) -> float:
    """A number of a metrics line: null, which is what JSON has for one that is not finite, is NaN."""
    return math.nan if value is None else float(value)


def _read_record(path: str | Path, kind: type[T]) -> T:
    data = read_json(path)
    try:
        return _as(kind, data, "the file")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _as(hint: Any, value: Any, where: str) -> Any:
    """`value`, as JSON gives it, as the type `hint`; ValueError saying where it does not fit. null is a float: NaN."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return None if value is None else _as(next(a for a in arguments if a is not types.NoneType), value, where)
    if origin is Literal and value in arguments:
        return value
    if is_dataclass(hint) and isinstance(value, dict):
        return _as_record(hint, value, where)
    if origin is dict and isinstance(value, dict):
        return {key: _as(arguments[1], item, f"{where}[{key!r}]") for key, item in value.items()}
    if origin in (tuple, list) and isinstance(value, list):
        if origin is tuple and arguments[-1] is not Ellipsis and len(value) != len(arguments):
            raise ValueError(f"{where} must hold {len(arguments)} values, got {len(value)}")
        return origin(_as(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if hint is float and (value is None or isinstance(value, int | float)) and not isinstance(value, bool):
        return math.nan if value is None else float(value)
    if hint in (int, str, bool) and isinstance(value, hint) and isinstance(value, bool) == (hint is bool):
        return value
    allowed = f"one of {arguments}" if origin is Literal else "an object" if is_dataclass(hint) else None
    raise ValueError(f"{where} must be {allowed or getattr(origin or hint, '__name__', hint)}, got {value!r:.60}")


def _as_record(kind: Any, value: dict[str, Any], where: str) -> Any:
    hints = {name: hint for name, hint in get_type_hints(kind).items() if name in kind.__dataclass_fields__}
    keys = {name.rstrip("_"): name for name in hints}
    optional = {field.name.rstrip("_") for field in fields(kind) if field.default is not MISSING}
    if missing := sorted(keys.keys() - value.keys() - optional):
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    if unknown := sorted(value.keys() - keys.keys()):
        raise ValueError(f"{where} has the unknown key {', '.join(unknown)}; allowed are {', '.join(sorted(keys))}")
    return kind(**{name: _as(hints[name], value[key], f"{where}.{key}") for key, name in keys.items() if key in value})
