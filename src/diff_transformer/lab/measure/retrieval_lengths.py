"""Measures recall in contexts that are longer than any that was trained on (beyond the paper)."""

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from diff_transformer.data import RetrievalBatches
from diff_transformer.lab.coordinates import Coordinates
from diff_transformer.lab.measure.accuracy import share_record
from diff_transformer.lab.measure.measurement import Count, Counts, EvalInput, Measurement, Options, check_counts
from diff_transformer.lab.measure.retrieval import retrieval_answers
from diff_transformer.lab.record import Result

LENGTH_ACCURACY = "length/accuracy"


def length_records(
    model: Any, batches: RetrievalBatches, variant: str, *, factors: Sequence[int], sequences: int, seed: int = 0
) -> list[Result]:
    """The share of first queries answered right, in contexts so many times as long as in training.

    Args:
        model: trained on `batches`, in evaluation mode.
        batches: the task; as many needles as in training lie in the longer contexts.
        variant: what to call the model in the records.
        factors: how many times as long; a record for each.
        sequences: for each factor.
        seed: of the sequences.

    Raises:
        ValueError: a factor or a number of sequences below 1.
    """
    check_counts(1, factors=min(factors), sequences=sequences)
    records = []
    for factor in factors:
        # One query: what the answers to others give away is no part of it.
        longer = batches.asking(batches.num_pairs, 1, factor * batches.context_length)
        right = retrieval_answers(model, longer.sample(sequences, seed))
        records.append(
            share_record(
                LENGTH_ACCURACY, right, variant=variant, coordinates=Coordinates(context_factor=factor), seed=seed
            )
        )
    return records


class LengthOptions(Options):
    """How long the contexts are."""

    factors: Counts = Field(default=(1, 2, 4), description="lengths of a context, in those of training")
    sequences: Count = Field(default=2048, description="sequences of each length")


def _run(measured: EvalInput, options: LengthOptions) -> list[Result]:
    if not isinstance(measured.batches, RetrievalBatches):
        raise ValueError(
            "retrieval_lengths is measured on the retrieval task alone, which the model was not trained on; of a model "
            "of text, measure positions."
        )
    return length_records(measured.model, measured.batches, measured.variant, seed=measured.seed, **dict(options))


RETRIEVAL_LENGTHS = Measurement(
    name="retrieval_lengths",
    description="recall in contexts once, twice and four times as long as in training (beyond the paper)",
    options=LengthOptions,
    run=_run,
    needs="recipe",
)
