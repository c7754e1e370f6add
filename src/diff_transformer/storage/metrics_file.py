"""Reads `metrics.jsonl`, in which a training run logs its numbers: a line with a JSON object for each logged step."""

from pathlib import Path
from typing import Any

from diff_transformer.storage.files import parse_json


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The logged steps of a `metrics.jsonl`, without the half line that a running or killed training leaves.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not one of metrics; the message names it.
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
