"""Beyond the paper: recall in contexts that are longer than any that was trained on."""

from collections.abc import Sequence
from typing import Any

from diff_transformer.data import RetrievalBatches
from diff_transformer.eval.measures import Measure, Subject
from diff_transformer.eval.options import check_counts
from diff_transformer.eval.retrieval import retrieval_answers
from diff_transformer.eval.shares import share_record
from diff_transformer.results import Result

LENGTH_ACCURACY = "length/accuracy"


def times(factor: int) -> str:
    """The group of contexts that many times as long as in training."""
    return f"context × {factor}"


def length_records(
    model: Any, batches: RetrievalBatches, arm: str, *, factors: Sequence[int], sequences: int, seed: int = 0
) -> list[Result]:
    """The share of first queries answered right, in contexts so many times as long as in training.

    Args:
        model: trained on `batches`, in evaluation mode.
        batches: the task; as many needles as in training lie in the longer contexts.
        arm: what to call the model in the records.
        factors: how many times as long; a record for each, see `times`.
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
        records.append(share_record(LENGTH_ACCURACY, right, arm=arm, group=times(factor), seed=seed))
    return records


def _measure(subject: Subject) -> list[Result]:
    if not isinstance(subject.batches, RetrievalBatches):
        raise ValueError(
            "retrieval_lengths is measured on the retrieval task alone, which the model was not trained on; of a model "
            "of text, measure positions."
        )
    return length_records(subject.model, subject.batches, subject.arm, seed=subject.seed, **subject.options)


RETRIEVAL_LENGTHS = Measure(
    shows="recall in contexts once, twice and four times as long as in training (beyond the paper)",
    measure=_measure,
    needs="recipe",
    options={"factors": [1, 2, 4], "sequences": 2048},
)
