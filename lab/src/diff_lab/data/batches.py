"""Defines the interface of data for training and the base of generated tasks; pads and flattens batches."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

ALL_ROWS = slice(None)
IGNORED = -100  # the label of what is not to be predicted, as in transformers

# Which random numbers a generated batch is drawn from, (seed, purpose, number): no two purposes share any.
TRAINING, VALIDATION, SAMPLE = range(3)
Stream = tuple[int, int, int]

T = TypeVar("T")


class Batches(Protocol):
    """Interface of the data for training.

    A batch is a dictionary of `input_ids` and `labels`, both (batch, length) int64 on the CPU, and of `position_ids` of
    the same shape if sequences hold several documents that do not see each other. Labels are as in transformers: the
    same positions as `input_ids` (the model of the next token shifts them, an encoder does not), −100 if nothing is to
    be predicted. A row's first label, and that of a document that sees itself alone, is never predicted.
    """

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""

    @property
    def source(self) -> str:
        """A fingerprint of the data behind the batches, beside the settings: of all documents, for text."""

    def train_batch(self, step: int, rows: slice = ALL_ROWS) -> dict[str, Tensor]:
        """Return rows of the batch of a step, counted from 1: a pure function of the settings, the seed and `step`.

        So resuming needs no state of the data, all models of a comparison see the same batches, and a rank makes its
        own rows alone.
        """

    def validation_batches(self) -> Iterator[dict[str, Tensor]]:
        """Return the validation data, the same in each call."""


@dataclass(eq=False, kw_only=True)
class GeneratedBatches(ABC):
    """Batches that a task draws from random numbers; a task fills in `draw`, and says how many sequences validate."""

    batch_size: int = 32
    seed: int = 0  # of the training sequences; the validation sequences do not depend on it
    validation_size: int = field(init=False, repr=False)
    source = ""  # there is none but the settings

    def __post_init__(self) -> None:
        """Raise ValueError for a whole number among the settings, but for the seed, that is below 1."""
        for name, value in vars(self).items():
            if type(value) is int and value < 1 and name != "seed":  # False is no number
                raise ValueError(f"{name} must be at least 1, got {name}={value}.")

    @abstractmethod
    def draw(self, count: int, stream: Stream) -> dict[str, Tensor]:
        """Draw a batch of `count` sequences from the random numbers of a stream."""

    def train_batch(self, step: int, rows: slice = ALL_ROWS) -> dict[str, Tensor]:
        """Return sequences of a step, all drawn from one stream; see `Batches.train_batch`."""
        return {name: x[rows] for name, x in self.draw(self.batch_size, (self.seed, TRAINING, step)).items()}

    def validation_batches(self) -> Iterator[dict[str, Tensor]]:
        """Yield the same `validation_size` sequences in each call; the last batch may be smaller."""
        for start in range(0, self.validation_size, self.batch_size):
            yield self.draw(min(self.batch_size, self.validation_size - start), (0, VALIDATION, start))


def grouped(items: Iterable[T], size: Callable[[T], int], least: int) -> Iterator[list[T]]:
    """Yield the items in groups whose sizes add up to `least` or just more; the last group may be smaller."""
    group: list[T] = []
    total = 0
    for item in items:
        group.append(item)
        total += size(item)
        if total >= least:
            yield group
            group, total = [], 0
    if group:
        yield group


def padded(rows: Iterable[tuple[Sequence[int], Sequence[bool]]], length: int) -> dict[str, Tensor]:
    """Pad sequences of at most `length` tokens, given with whether each token is learned, to a batch (rows, length).

    Only learned tokens have labels. Behind the end of a sequence its last token is repeated, without labels.
    """
    filled = []
    for tokens, learned in rows:
        padding = length - len(tokens)
        filled.append(([*tokens, *[tokens[-1]] * padding], [*learned, *[False] * padding]))
    input_ids, is_learned = (torch.tensor(part) for part in zip(*filled, strict=True))
    return {"input_ids": input_ids, "labels": torch.where(is_learned, input_ids, IGNORED)}


def flattened(batch: dict[str, Tensor]) -> dict[str, Any]:
    """Flatten a batch (B, N) of rows with several documents to one row (1, B·N), for a model that attends by document.

    The first token of a document has no label. The row names the documents as transformers does: `cu_seq_lens_q` and
    `cu_seq_lens_k`, int32, hold the first token of each and B·N, repeated until there are 2, 4, 8 … entries, so that
    compiled code meets few shapes. A batch without `position_ids` stays as it is.
    """
    if "position_ids" not in batch:
        return dict(batch)
    begins = torch.ones_like(batch["position_ids"], dtype=torch.bool)
    begins[:, 1:] = batch["position_ids"].diff(dim=1) != 1
    row: dict[str, Any] = {name: tensor.reshape(1, -1) for name, tensor in batch.items()}
    row["labels"] = batch["labels"].masked_fill(begins, IGNORED).reshape(1, -1)
    tokens = begins.numel()
    ends = F.pad(begins.flatten().nonzero().squeeze(1), (0, 1), value=tokens).to(torch.int32)
    longest = int(ends.diff().max())
    ends = F.pad(ends, (0, (1 << (len(ends) - 1).bit_length()) - len(ends)), value=tokens)
    return row | {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
