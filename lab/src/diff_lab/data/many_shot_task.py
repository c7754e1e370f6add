"""Draws many-shot classification at the level of tokens: words of classes, shown with their labels (Section 3.5)."""

from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch
from torch import Tensor

from diff_lab.data.batches import IGNORED, SAMPLE, TRAINING, GeneratedBatches, Stream


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

    The vocabulary, in this order: labels, words.

    Args:
        shots: items in a sequence.
        classes: in a sequence.
        labels: tokens that classes may have for labels, `classes` or more; with more, a model first learns which ones
            occur.
        words: of all classes together.
        item_length: words in an item.
        noise: the share of items whose label is drawn from all classes.
        vary: whether each sequence to train on has its own number of classes, from 1, and as many words for each as
            the largest ones have.

    Raises:
        ValueError: a number is out of range, or there are fewer words than classes.
    """

    shots: int = 48
    _: KW_ONLY
    classes: int = 6
    labels: int = 32
    words: int = 36
    item_length: int = 2
    noise: float = 0.1
    vary: bool = False
    validation_sequences: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.classes <= min(self.words, self.labels):
            raise ValueError(
                "classes must be 2 or more, and words and labels at least as many, "
                f"got classes={self.classes}, words={self.words}, labels={self.labels}."
            )
        if not 0 <= self.noise < 1:
            raise ValueError(f"noise must be at least 0 and below 1, got {self.noise}.")
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
