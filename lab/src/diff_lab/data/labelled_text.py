"""Reads labelled questions for many-shot classification, of TREC, Banking-77 and CLINC-150, from their files."""

import csv
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from diff_transformer.utils.files import read_json
from diff_transformer.utils.suggestions import quoted, some

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
        """Write a text with its label, as it stands in a prompt."""
        return f"{self.query(text)} {label}{SEPARATOR}"

    def query(self, text: str) -> str:
        """Write a text whose label is to come, after a space."""
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
    train, test = (tuple(read(Path(folder), part)) for part in ("train", "test"))
    if not train or not test:
        raise ValueError(f"The {'test' if train else 'training'} part of {name} in {str(folder)!r} is empty.")
    labels = tuple(sorted({label for _, label in train}))
    if unknown := sorted({label for _, label in test}.difference(labels)):
        raise ValueError(f"In {str(folder)!r} the test part of {name} alone has the label {quoted(unknown[0])}.")
    return LabelledText(name, train, test, labels, input_name, label_name)


Rows = Iterator[tuple[str, str]]


def _trec(folder: Path, part: str, fine: bool) -> Rows:
    file = _find(folder, *{"train": ("train.txt", "train_5500.label"), "test": ("test.txt", "TREC_10.label")}[part])
    # The files are in Latin-1, in which every byte is a character; only "\n" ends a line.
    for number, line in enumerate(file.read_bytes().removeprefix(BOM_UTF8).decode("latin-1").split("\n"), 1):
        name, _, text = line.strip().partition(" ")
        coarse, _, fine_class = name.partition(":")
        if coarse in _TREC and fine_class and text:
            yield text, f"{_TREC[coarse]} {fine_class}" if fine else _TREC[coarse]
        elif name:
            expected = f"a line is COARSE:fine and a question, with {', '.join(_TREC)}"
            raise ValueError(f"{file}, line {number}: {expected}; got {quoted(line)}.")


def _banking77(folder: Path, part: str) -> Rows:
    file = _find(folder, f"{part}.csv")
    with file.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines)
        if not {"text", "category"} <= set(rows.fieldnames or ()):
            raise ValueError(
                f"{file} has no columns 'text' and 'category', but {some(map(quoted, rows.fieldnames or ()))}."
            )
        for row in rows:
            yield _pair([row["text"], row["category"]], f"{file}, line {rows.line_num}")


def _clinc150(folder: Path, part: str) -> Rows:
    file = _find(folder, "data_full.json")
    try:
        rows = enumerate(read_json(file)[part], 1)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not JSON with the lists 'train' and 'test': {error}.") from None
    for number, row in rows:
        yield _pair(row, f"{file}, row {number}")


def _pair(row: Any, location: str) -> tuple[str, str]:
    is_pair = isinstance(row, list) and len(row) == 2
    if not is_pair or not all(isinstance(text, str) and text.strip() for text in row):
        raise ValueError(
            f"{location}: a text and its label are a list of two texts that are not empty, got {quoted(row)}."
        )
    text, label = row
    return " ".join(text.split()), label.replace("_", " ").strip()


def _find(folder: Path, *names: str) -> Path:
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"{str(folder)!r} holds no {' or '.join(names)}.")


_READERS: dict[str, tuple[Callable[[Path, str], Rows], str, str]] = {
    "trec": (partial(_trec, fine=False), "Question", "Type"),
    "trec-fine": (partial(_trec, fine=True), "Question", "Type"),
    "banking77": (_banking77, "query", "intent"),
    "clinc150": (_clinc150, "utterance", "intent"),
}
