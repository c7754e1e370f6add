"""Measures the loss by position in long documents, at each position and cumulated up to it (Figure 4)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import Field

from diff_transformer.data import Batches, TextBatches
from diff_transformer.lab.coordinates import Coordinates
from diff_transformer.lab.measure.measurement import Count, EvalInput, Measurement, Options
from diff_transformer.lab.measure.standard import chosen_documents, text_part, token_losses
from diff_transformer.lab.record import Result
from diff_transformer.lab.statistics import bootstrap_interval

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


def measured_documents(batches: TextBatches, *, length: int | None, first: int, documents: int) -> list[np.ndarray]:
    """The documents of which `position_records` measures the loss. Raises as it does, without a model."""
    length = batches.length if length is None else length
    if not 2 <= first <= length:
        raise ValueError(f"first must lie in 2 … length = {length}, got {first}.")
    return chosen_documents(batches.documents(), length, documents)


def position_records(
    model: Any,
    batches: TextBatches,
    variant: str,
    *,
    seed: int | None = None,
    length: int | None = None,
    first: int = 64,
    documents: int = 100,
    windows: int = 1,
) -> list[Result]:
    """Figure 4 for one model, in nats per token.

    "positions/cumulative_loss" at 256 first tokens is the mean over all tokens with fewer than 256 before them;
    "positions/loss" at the positions 128 to 255 that of the tokens with so many before them.

    Args:
        model: as :func:`position_losses`.
        batches: the text, of which whole validation documents are read.
        variant, seed: for the records.
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
        records.append(_record("positions/cumulative_loss", Coordinates(first_tokens=mark), cumulated, variant, seed))
        records.append(_record("positions/loss", Coordinates(position=(before, mark - 1)), own, variant, seed))
        before = mark
    return records


def _record(name: str, coordinates: Coordinates, sums: np.ndarray, variant: str, seed: int | None) -> Result:
    documents = [(float(total), float(count)) for total, count in sums]
    total, count = sums.sum(0)
    return Result(
        name=name,
        variant=variant,
        value=float(total / count),
        interval=bootstrap_interval(documents),
        n=int(count),
        unit="nats/token",
        seed=seed,
        better="lower",
        coordinates=coordinates,
        method=METHOD,
        documents=tuple(documents),
    )


class PositionOptions(Options):
    """How the loss by position is measured."""

    length: Count | None = Field(default=None, description="tokens of a context; as in training unless given")
    first: Count = Field(default=64, description="the first position that is reported")
    documents: Count = Field(default=100, description="documents, at most")
    windows: Count = Field(default=1, description="contexts of each document, at most")


def _run(measured: EvalInput, options: PositionOptions) -> list[Result]:
    text = text_part(measured.batches)
    return position_records(measured.model, text, measured.variant, seed=measured.seed, **dict(options))


def _check(options: PositionOptions, batches: Batches, _: Any) -> None:
    measured_documents(text_part(batches), length=options.length, first=options.first, documents=options.documents)


POSITIONS = Measurement(
    name="positions",
    description="loss by position in long documents, and cumulated up to it (Figure 4)",
    options=PositionOptions,
    run=_run,
    needs="text",
    any_model=True,
    check=_check,
)
