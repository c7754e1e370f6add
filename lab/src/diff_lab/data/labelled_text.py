"""Reads labelled texts for many-shot classification from tables of two columns."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from diff_transformer.utils.suggestions import quoted, some

SEPARATOR = "\n==\n"
# The names that stand before a text and its label in a prompt, of the tasks of Figures 6 and 7 and of any other.
_QUESTION, _UTTERANCE, _OTHER = ("Question", "Type"), ("utterance", "intent"), ("text", "label")
_NAMES = {"trec": _QUESTION, "trec-fine": _QUESTION, "banking77": ("query", "intent"), "clinc150": _UTTERANCE}


@dataclass(frozen=True)
class LabelledText:
    """A classification task and how its prompts are written."""

    name: str  # such as "trec"
    train: tuple[tuple[str, str], ...]  # texts with their labels
    test: tuple[tuple[str, str], ...]
    labels: tuple[str, ...]  # all, sorted
    input_name: str  # what stands before a text: "Question"
    label_name: str  # and before its label: "Type"

    def demonstration(self, text: str, label: str) -> str:
        """Write a text with its label, as it stands in a prompt."""
        return f"{self.query(text)} {label}{SEPARATOR}"

    def query(self, text: str) -> str:
        """Write a text whose label is to come, after a space."""
        return f"{self.input_name}: {text}\n{self.label_name}:"


def read_labelled(name: str, folder: str | Path) -> LabelledText:
    """Read a task from the files "train" and "test" of a folder, `.csv`, `.jsonl` or `.parquet`.

    Their columns "text" and "label" hold the texts and the words of their labels.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file lacks these columns or has no rows, or a row is not two texts; the row is named.
    """
    train, test = (_rows(Path(folder), part) for part in ("train", "test"))
    labels = tuple(sorted({label for _, label in train}))
    if unknown := sorted({label for _, label in test}.difference(labels)):
        raise ValueError(f"In {str(folder)!r} the test part of {name} alone has the label {quoted(unknown[0])}.")
    return LabelledText(name, train, test, labels, *_NAMES.get(name, _OTHER))


def _rows(folder: Path, part: str) -> tuple[tuple[str, str], ...]:
    from pyarrow import ArrowException, csv, json, parquet  # `datasets` brings it

    words = csv.ConvertOptions(column_types={"text": "string", "label": "string"})
    readers: dict[str, Callable[[Path], Any]] = {
        f"{part}.csv": partial(
            csv.read_csv, parse_options=csv.ParseOptions(newlines_in_values=True), convert_options=words
        ),
        f"{part}.jsonl": json.read_json,
        f"{part}.parquet": parquet.read_table,
    }
    file = next((folder / name for name in readers if (folder / name).is_file()), None)
    if file is None:
        raise FileNotFoundError(f"{str(folder)!r} holds no {' or '.join(readers)}.")
    try:
        table = readers[file.name](file)
    except (ArrowException, OSError) as error:
        raise ValueError(f"{file} cannot be read: {' '.join(str(error).split())}") from None
    if not {"text", "label"} <= set(table.column_names):
        raise ValueError(f"{file} has no columns 'text' and 'label', but {some(map(quoted, table.column_names))}.")
    rows = list(zip(table["text"].to_pylist(), table["label"].to_pylist(), strict=True))
    if not rows:
        raise ValueError(f"{file} has no rows.")
    for number, row in enumerate(rows, start=1):
        if not all(isinstance(cell, str) and cell.strip() for cell in row):
            raise ValueError(f"{file}, row {number}: a text and its label are not empty, got {quoted(list(row))}.")
    return tuple((" ".join(text.split()), " ".join(label.split())) for text, label in rows)
