"""Measures AR-hit: the loss on tokens that complete a bigram of their context, and on all others (Table 6).

A token x_t is a *hit* where the pair (x_{t−1}, x_t) stands earlier in its own context: x_{s−1} = x_{t−1} and x_s = x_t
for some s < t, both of them after the context's beginning. Such a token can be found by looking back for its
predecessor (associative recall). Pairs that the training text holds often can be known without looking, and are left
out: they count among the *others*. The paper follows Arora et al., "Zoology" (arXiv 2312.04927), and does not say from
which frequency on a pair is left out; here it is the setting `frequent`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import Field

from diff_transformer.data import TextBatches
from diff_transformer.lab.coordinates import NOWHERE, Coordinates
from diff_transformer.lab.measure.measurement import Count, EvalInput, Measurement, Options
from diff_transformer.lab.measure.standard import chosen_documents, text_part, token_losses
from diff_transformer.lab.record import Result
from diff_transformer.lab.statistics import bootstrap_interval

METHOD = "bootstrap over documents"
_CHUNK = 1 << 24  # bigrams of the training text that are counted at a time


def bigrams(tokens: np.ndarray) -> np.ndarray:
    """Each token with the one before it as one number: (n,) → (n − 1,) int64."""
    wide = tokens.astype(np.int64)
    return wide[:-1] << 32 | wide[1:]


def repeated(pairs: np.ndarray) -> np.ndarray:
    """Which of the numbers (n,) stand earlier in the row already: (n,) bool."""
    _, first = np.unique(pairs, return_index=True)
    seen = np.ones(len(pairs), dtype=bool)
    seen[first] = False
    return seen


def frequent_bigrams(documents: Iterable[np.ndarray], most: int) -> np.ndarray:
    """The bigrams that stand more than `most` times in all documents together, sorted."""
    numbers, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    for part in _parts(documents):
        found, often = np.unique(part, return_counts=True)
        together, places = np.unique(np.concatenate([numbers, found]), return_inverse=True)
        counts = np.bincount(places, weights=np.concatenate([counts, often])).astype(np.int64)
        numbers = together
    return numbers[counts > most]


def _parts(documents: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    held: list[np.ndarray] = []
    size = 0
    for document in documents:
        held.append(bigrams(document))
        size += len(held[-1])
        if size >= _CHUNK:
            yield np.concatenate(held)
            held, size = [], 0
    if held:
        yield np.concatenate(held)


def repeat_losses(
    model: Any, documents: Sequence[np.ndarray], frequent: np.ndarray, length: int
) -> dict[str, list[tuple[float, float]]]:
    """The summed loss and the number of tokens, of hits and of others, for each document.

    Args:
        model: a causal language model of transformers in evaluation mode.
        documents: tokens of each; longer ones are cut into contexts of `length`, each of which begins anew.
        frequent: the bigrams that are left out of the hits, sorted.
        length: tokens of a context.

    Returns:
        "hit" and "other", each with the (sum, count) of every document.
    """
    contexts = list(_contexts(documents, frequent, length))
    sums = {name: np.zeros((len(documents), 2)) for name in ("hit", "other")}
    for (owner, _, hits), losses in zip(contexts, token_losses(model, [row for _, row, _ in contexts]), strict=True):
        for name, chosen in (("hit", hits), ("other", ~hits)):
            sums[name][owner] += losses[chosen].sum(), chosen.sum()
    return {name: [(float(total), float(count)) for total, count in parts] for name, parts in sums.items()}


def _contexts(
    documents: Sequence[np.ndarray], frequent: np.ndarray, length: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Each context with the number of its document, and which of its tokens but the first are hits."""
    for number, document in enumerate(documents):
        # Contexts overlap by one token, so that each but the first is predicted once.
        for start in range(0, len(document) - 1, length - 1):
            row = document[start : start + length]
            pairs = bigrams(row)
            yield number, row, repeated(pairs) & ~np.isin(pairs, frequent)


def _measured(batches: TextBatches, documents: int, frequent: int, longest: int) -> tuple[list[np.ndarray], np.ndarray]:
    """The documents that are measured, and the bigrams that are left out of the hits."""
    chosen = [document[:longest] for document in chosen_documents(batches.documents(), 2, documents)]
    return chosen, frequent_bigrams(batches.documents(training=bool(batches.train_tokens)), frequent)


def check_repeats(
    batches: TextBatches, *, length: int | None = None, documents: int = 200, frequent: int = 100, longest: int = 16384
) -> None:
    """Raises as `repeat_records` with the same settings, without a model."""
    chosen, left_out = _measured(batches, documents, frequent, longest)
    marked = [hits for _, _, hits in _contexts(chosen, left_out, length or batches.length)]
    hit, tokens = sum(int(hits.sum()) for hits in marked), sum(map(len, marked))
    _refuse_none({"hit": hit, "other": tokens - hit}, frequent)


def _refuse_none(counts: Mapping[str, float], frequent: int) -> None:
    for name, count in counts.items():
        if not count:
            raise ValueError(
                f"None of {sum(counts.values()):.0f} tokens is a {name!r} token with bigrams left out above "
                f"{frequent} times."
            )


def repeat_records(
    model: Any,
    batches: TextBatches,
    variant: str,
    *,
    seed: int | None = None,
    coordinates: Coordinates = NOWHERE,
    length: int | None = None,
    documents: int = 200,
    frequent: int = 100,
    longest: int = 16384,
) -> list[Result]:
    """Table 6's three columns for one model: "repeats/loss", "repeats/ar_hit", "repeats/other", in nats per token.

    Args:
        model: as :func:`repeat_losses`.
        batches: the text, whose training part says which bigrams are frequent (the measured part where it has none).
        variant, seed, coordinates: for the records.
        length: tokens of a context; that of the batches unless given.
        documents: at most so many validation documents, spread evenly.
        frequent: a bigram that the text holds more often is left out of the hits.
        longest: of a document that has more tokens, the first ones alone.

    Raises:
        ValueError: too few documents, or no hit or no other token in them.
    """
    chosen, left_out = _measured(batches, documents, frequent, longest)
    parts = repeat_losses(model, chosen, left_out, length or batches.length)
    _refuse_none({name: sum(count for _, count in part) for name, part in parts.items()}, frequent)
    parts["loss"] = [
        (hit[0] + other[0], hit[1] + other[1]) for hit, other in zip(parts["hit"], parts["other"], strict=True)
    ]
    counts = {name: sum(count for _, count in part) for name, part in parts.items()}
    names = {"loss": "repeats/loss", "hit": "repeats/ar_hit", "other": "repeats/other"}
    records = [
        Result(
            name=names[part],
            variant=variant,
            value=sum(total for total, _ in parts[part]) / counts[part],
            interval=bootstrap_interval(parts[part]),
            n=int(counts[part]),
            unit="nats/token",
            seed=seed,
            coordinates=coordinates,
            better="lower",
            method=METHOD,
            documents=tuple(parts[part]),
        )
        for part in names
    ]
    share = counts["hit"] / counts["loss"]
    return [
        *records,
        Result(
            name="repeats/share",
            variant=variant,
            value=share,
            n=int(counts["loss"]),
            seed=seed,
            coordinates=coordinates,
        ),
    ]


class RepeatOptions(Options):
    """How AR-hit is measured."""

    length: Count | None = Field(default=None, description="tokens of a context; as in training unless given")
    documents: Count = Field(default=200, description="documents, at most")
    frequent: Count = Field(default=100, description="how often a bigram may stand in the text and be left in the hits")
    longest: Count = Field(default=16384, description="tokens of a document, at most")


def _run(measured: EvalInput, options: RepeatOptions) -> list[Result]:
    text = text_part(measured.batches)
    return repeat_records(measured.model, text, measured.variant, seed=measured.seed, **dict(options))


REPEATS = Measurement(
    name="repeats",
    description="AR-hit (Table 6): the loss on tokens that complete an earlier bigram of their context, and on others",
    options=RepeatOptions,
    run=_run,
    needs="text",
    any_model=True,
    check=lambda options, batches, _: check_repeats(text_part(batches), **dict(options)),
)
