"""Makes many-shot classification (Section 3.5): drawn, words of classes with labels, or labelled texts from tables."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from diff_lab.data.batches import IGNORED, SAMPLE, TRAINING, GeneratedBatches, Stream
from diff_transformer.utils.suggestions import quoted, some


@dataclass(frozen=True)
class Episode:
    """One assignment of words to classes, demonstrations of it and queries. All int64; a label is a token."""

    items: Tensor  # (shots, item_length), the demonstrated items
    labels: Tensor  # (shots,), the label that is shown with each, some of them wrong
    classes: Tensor  # (shots,), the class that each item is of, from 0
    queries: Tensor  # (Q, item_length), items that were drawn apart from the demonstrations
    answers: Tensor  # (Q,), their right labels
    candidates: Tensor  # (classes,), all labels of the episode

    def prompt(self, order: Tensor | None = None) -> Tensor:
        """Return the demonstrations in an order (shots,), as they are unless given: (shots · (item_length + 1),)."""
        shown = torch.cat((self.items, self.labels[:, None]), dim=1)
        return (shown if order is None else shown[order]).flatten()


@dataclass(eq=False)
class ManyShotBatches(GeneratedBatches):
    """Items and labels in turn; which word belongs to which class is drawn anew for each sequence.

        w7 w2 A  w9 w4 C  w2 w2 A  w4 w1 C  …

    An item is `item_length` words of one class, drawn with replacement. A sequence's words are dealt out to its
    classes evenly, and each class gets a label. Every label is learned, so that each demonstration is a query to those
    before it; a share of the labels, drawn from all classes, is noise.

    The vocabulary, in this order: labels, words. Raises ValueError if a number is out of range, or there are fewer
    words than classes.
    """

    shots: int = 48  # items in a sequence
    _: KW_ONLY
    classes: int = 6  # in a sequence
    labels: int = 32  # tokens for labels; with more of them than classes a model first learns which ones occur
    words: int = 36  # of all classes together
    item_length: int = 2  # words in an item
    noise: float = 0.1  # the share of items whose label is drawn from all classes
    # Whether each sequence to train on has its own number of classes, from 1, with as many words as the largest have.
    vary: bool = False
    validation_sequences: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.classes <= min(self.words, self.labels):
            raise ValueError(
                "classes must be 2 or more, and words and labels at least as many, "
                f"got classes={self.classes}, words={self.words}, labels={self.labels}."
            )
        self.vocab_size = self.labels + self.words
        self.length = self.shots * (self.item_length + 1)
        self.validation_size = self.validation_sequences

    def draw(self, count: int, stream: Stream) -> dict[str, Tensor]:
        vary = self.vary and stream[1] == TRAINING
        items, shown, *_ = self._items(np.random.default_rng(stream), count, self.shots, self.noise, vary=vary)
        rows = np.concatenate((items, shown[:, :, None]), axis=2)
        learned = np.full_like(rows, IGNORED)
        learned[:, :, -1] = shown
        batch = {"input_ids": rows, "labels": learned}
        return {name: torch.from_numpy(part.reshape(count, -1)) for name, part in batch.items()}

    def episode(self, seed: int, number: int, shots: int, queries: int, noise: float) -> Episode:
        """Return demonstrations and queries to evaluate on, drawn for (`seed`, `number`); none is for training."""
        random = np.random.default_rng((seed, SAMPLE, number))
        drawn = self._items(random, 1, shots + queries, noise)
        items, labels, answers, classes, candidates = (torch.from_numpy(part[0]) for part in drawn)
        return Episode(items[:shots], labels[:shots], classes[:shots], items[shots:], answers[shots:], candidates)

    def _items(
        self, random: np.random.Generator, n: int, count: int, noise: float, *, vary: bool = False
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Draw items (n, count, item_length); their shown and right labels and classes, (n, count); labels of classes,
        (n, classes).
        """
        dealt = random.random((n, self.words)).argsort(axis=1)  # class c of C has the words dealt at c, c + C, …
        label_of = random.random((n, self.labels)).argsort(axis=1)[:, : self.classes]
        of = random.integers(1, self.classes + 1, size=(n, 1)) if vary else np.full((n, 1), self.classes)
        words = self.words * of // self.classes
        classes = (random.random((n, count)) * of).astype(np.int64)
        # Classes whose turn comes once more than others' have one word more.
        sizes = (words - classes + of - 1) // of
        turns = (random.random((n, count, self.item_length)) * sizes[:, :, None]).astype(np.int64)
        word_ranks = classes[:, :, None] + of[:, :, None] * turns
        items = self.labels + np.take_along_axis(dealt, word_ranks.reshape(n, -1), axis=1).reshape(word_ranks.shape)
        answers = np.take_along_axis(label_of, classes, axis=1)
        drawn = np.take_along_axis(label_of, (random.random((n, count)) * of).astype(np.int64), axis=1)
        shown = np.where(random.random((n, count)) < noise, drawn, answers)
        return items, shown, answers, classes, label_of


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
    """Read a task from `train.csv` and `test.csv` of a folder, whose columns are "text" and "label".

    Raises FileNotFoundError, or ValueError if a file lacks these columns or has no rows, or a row lacks a text.
    """
    train, test = (_rows(Path(folder, file)) for file in ("train.csv", "test.csv"))
    labels = tuple(sorted({label for _, label in train}))
    if unknown := sorted({label for _, label in test}.difference(labels)):
        raise ValueError(f"In {str(folder)!r} the test part of {name} alone has the label {quoted(unknown[0])}.")
    return LabelledText(name, train, test, labels, *_NAMES.get(name, _OTHER))


def _rows(file: Path) -> tuple[tuple[str, str], ...]:
    import pandas  # type: ignore[import-untyped, unused-ignore]  # takes a second, and its types are a package apart

    if not file.is_file():
        raise FileNotFoundError(f"There is no file {str(file)!r} of labelled texts.")
    try:
        table = pandas.read_csv(file, dtype=str, keep_default_na=False)
    except (ValueError, OSError) as error:
        raise ValueError(f"{file} cannot be read: {' '.join(str(error).split())}") from None
    if not {"text", "label"} <= set(table):
        raise ValueError(f"{file} has no columns 'text' and 'label', but {some(map(quoted, table))}.")
    if table.empty:
        raise ValueError(f"{file} has no rows.")
    rows = list(zip(table.text, table.label, strict=True))
    for number, row in enumerate(rows, start=1):
        if not all(map(str.strip, row)):
            raise ValueError(f"{file}, row {number}: a text and its label are not empty, got {quoted(list(row))}.")
    return tuple((" ".join(text.split()), " ".join(label.split())) for text, label in rows)
