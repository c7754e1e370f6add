"""Reads labelled questions for many-shot classification, of TREC, Banking-77 and CLINC-150, from their files."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from diff_transformer.storage.files import read_json

SEPARATOR = "\n==\n"

# Words for TREC's classes of questions, which its files abbreviate.
_TREC = {
    "ABBR": "abbreviation",
    "DESC": "description",
    "ENTY": "entity",
    "HUM": "human",
    "LOC": "location",
    "NUM": "number",
}


@dataclass(frozen=True)
class LabelledText:
    """A classification task and how its prompts are written."""

    name: str  # "trec", "trec-fine", "banking77" or "clinc150"
    train: tuple[tuple[str, str], ...]  # texts with their labels
    test: tuple[tuple[str, str], ...]
    labels: tuple[str, ...]  # all, sorted
    input_name: str  # what stands before a text: "Question"
    label_name: str  # and before its label: "Type"

    def demonstration(self, text: str, label: str) -> str:
        """A text with its label, as it stands in a prompt."""
        return f"{self.query(text)} {label}{SEPARATOR}"

    def query(self, text: str) -> str:
        """A text whose label is to come, after a space."""
        return f"{self.input_name}: {text}\n{self.label_name}:"


def read_labelled(name: str, folder: str | Path) -> LabelledText:
    """Read a task from the files in which it is distributed.

    "trec" and "trec-fine" (6 and 50 classes): train.txt or train_5500.label, test.txt or TREC_10.label. "banking77":
    train.csv, test.csv. "clinc150": data_full.json, without the questions outside its 150 intents.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: another name, or a file that is not of its format; the line is named.
    """
    if name not in _READERS:
        raise ValueError(f"There is no labelled text {name!r}, only {', '.join(map(repr, _READERS))}.")
    read, input_name, label_name = _READERS[name]
    train, test = read(Path(folder))
    labels = tuple(sorted({label for _, label in train}))
    for part, rows in (("training", train), ("test", test)):
        if not rows:
            raise ValueError(f"The {part} part of {name} in {str(folder)!r} is empty.")
    if unknown := sorted({label for _, label in test}.difference(labels)):
        raise ValueError(
            f"The test part of {name} in {str(folder)!r} has the label {unknown[0]!r}, the training part none."
        )
    return LabelledText(name, tuple(train), tuple(test), labels, input_name, label_name)


Rows = list[tuple[str, str]]


def _trec(folder: Path, fine: bool) -> tuple[Rows, Rows]:
    def read(*names: str) -> Rows:
        file = _find(folder, names)
        # The files are in Latin-1, in which every byte is a character; only "\n" ends a line.
        lines = enumerate(file.read_bytes().decode("latin-1").split("\n"), 1)
        return [_question(line, fine, f"{file}, line {number}") for number, line in lines if line.strip()]

    return read("train.txt", "train_5500.label"), read("test.txt", "TREC_10.label")


def _question(line: str, fine: bool, where: str) -> tuple[str, str]:
    kind, _, text = line.strip().partition(" ")
    coarse, colon, fine_class = kind.partition(":")
    if coarse not in _TREC or not colon or not fine_class or not text:
        raise ValueError(f"{where}: a line is COARSE:fine and a question, with {', '.join(_TREC)}; got {line[:60]!r}.")
    return text, f"{_TREC[coarse]} {fine_class}" if fine else _TREC[coarse]


def _banking77(folder: Path) -> tuple[Rows, Rows]:
    def read(name: str) -> Rows:
        file = _find(folder, (name,))
        with file.open(encoding="utf-8", newline="") as lines:
            rows = csv.DictReader(lines)
            if not {"text", "category"} <= set(rows.fieldnames or ()):
                raise ValueError(f"{file} has no columns 'text' and 'category', but {rows.fieldnames}.")
            return [_pair(row["text"], row["category"], f"{file}, line {rows.line_num}") for row in rows]

    return read("train.csv"), read("test.csv")


def _clinc150(folder: Path) -> tuple[Rows, Rows]:
    file = _find(folder, ("data_full.json",))
    try:
        content = read_json(file)
        parts = content["train"], content["test"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not JSON with the lists 'train' and 'test': {error}.") from None
    train, test = ([_row(row, f"{file}, row {number}") for number, row in enumerate(part, 1)] for part in parts)
    return train, test


def _row(row: Any, where: str) -> tuple[str, str]:
    if not isinstance(row, list) or len(row) != 2:
        raise ValueError(f"{where}: a row is a list of a text and its intent, got {row!r}.")
    return _pair(row[0], row[1], where)


def _pair(text: object, label: object, where: str) -> tuple[str, str]:
    if not isinstance(text, str) or not isinstance(label, str) or not text.strip() or not label.strip():
        raise ValueError(f"{where}: a text and its label are not empty, got {text!r} and {label!r}.")
    return " ".join(text.split()), label.replace("_", " ").strip()


def _find(folder: Path, names: Sequence[str]) -> Path:
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"{str(folder)!r} holds no {' or '.join(names)}.")


_READERS: dict[str, tuple[Callable[[Path], tuple[Rows, Rows]], str, str]] = {
    "trec": (partial(_trec, fine=False), "Question", "Type"),
    "trec-fine": (partial(_trec, fine=True), "Question", "Type"),
    "banking77": (_banking77, "query", "intent"),
    "clinc150": (_clinc150, "utterance", "intent"),
}
