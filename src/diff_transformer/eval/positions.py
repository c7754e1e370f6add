"""Loss by position in long documents, each position on its own and cumulated (Figure 4)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from diff_transformer.data import TextBatches
from diff_transformer.eval.documents import chosen_documents, text_part, token_losses
from diff_transformer.eval.measures import Measure, Subject
from diff_transformer.results import Result, bootstrap_interval

METHOD = "bootstrap over documents"


def position_marks(length: int, first: int) -> list[int]:
    """first, 2·first, 4·first … up to `length`, which is always the last."""
    marks = []
    mark = first
    while mark < length:
        marks.append(mark)
        mark *= 2
    return [*marks, length]


def position_losses(model: Any, documents: Sequence[np.ndarray], length: int, windows: int = 1) -> np.ndarray:
    """−ln p of each token of the first contexts of documents, by its position.

    Args:
        model: a causal language model of transformers in evaluation mode.
        documents: tokens of each, `length` or more.
        length: tokens of a context.
        windows: at most so many contexts of a document, one after the other.

    Returns:
        (documents, length − 1, 2) float64: the summed loss of the tokens with 1, 2 … length − 1 tokens before them,
        and how many they are.

    Raises:
        ValueError: a document is shorter than `length`.
    """
    if shorter := [len(document) for document in documents if len(document) < length]:
        raise ValueError(f"Every document must have {length} tokens or more, got one of {min(shorter)}.")
    rows, owners = [], []
    for number, document in enumerate(documents):
        for window in range(min(windows, len(document) // length)):
            rows.append(document[window * length : (window + 1) * length])
            owners.append(number)
    sums = np.zeros((len(documents), length - 1, 2))
    for owner, losses in zip(owners, token_losses(model, rows), strict=True):
        sums[owner, :, 0] += losses
        sums[owner, :, 1] += 1
    return sums


def measured_documents(batches: TextBatches, *, length: int, first: int, documents: int) -> list[np.ndarray]:
    """The documents of which `position_records` measures the loss. Raises as it does, without a model."""
    if not 2 <= first <= length:
        raise ValueError(f"first must lie in 2 … length = {length}, got {first}.")
    return chosen_documents(batches.documents(), length, documents)


def position_records(
    model: Any,
    batches: TextBatches,
    arm: str,
    *,
    seed: int | None = None,
    length: int | None = None,
    first: int = 64,
    documents: int = 100,
    windows: int = 1,
) -> list[Result]:
    """Figure 4 for one model, in nats per token.

    "positions/cumulative_loss" of the group "first 256" is the mean over all tokens with fewer than 256 before them;
    "positions/loss" of the group "128–255" that of the tokens with so many before them.

    Args:
        model: as :func:`position_losses`.
        batches: the text, of which whole validation documents are read.
        arm, seed: for the records.
        length: tokens of a context; that of the batches unless given.
        first: the first position that is reported; then twice as many, and so on.
        documents: at most so many of the documents that are long enough, spread evenly.
        windows: at most so many contexts of each.

    Raises:
        ValueError: fewer than two documents are long enough, or the first position is not below `length`.
    """
    length = batches.length if length is None else length
    chosen = measured_documents(batches, length=length, first=first, documents=documents)
    sums = position_losses(model, chosen, length, windows)
    records = []
    before = 1  # the token at the very beginning is not predicted
    for mark in position_marks(length, first):
        cumulated, own = sums[:, : mark - 1].sum(1), sums[:, before - 1 : mark - 1].sum(1)
        records.append(_record("positions/cumulative_loss", f"first {mark}", cumulated, arm, seed))
        records.append(_record("positions/loss", f"{before}–{mark - 1}", own, arm, seed))
        before = mark
    return records


def _record(name: str, group: str, sums: np.ndarray, arm: str, seed: int | None) -> Result:
    documents = [(float(total), float(count)) for total, count in sums]
    total, count = sums.sum(0)
    return Result(
        name=name,
        arm=arm,
        value=float(total / count),
        interval=bootstrap_interval(documents),
        n=int(count),
        unit="nats/token",
        seed=seed,
        better="lower",
        group=group,
        method=METHOD,
        documents=tuple(documents),
    )


def _measure(subject: Subject) -> list[Result]:
    text = text_part(subject.batches)
    return position_records(subject.model, text, subject.arm, seed=subject.seed, **subject.options)


POSITIONS = Measure(
    shows="loss by position in long documents, and cumulated up to it (Figure 4)",
    measure=_measure,
    needs="text",
    any_model=True,
    options={"length": None, "first": 64, "documents": 100, "windows": 1},
)
