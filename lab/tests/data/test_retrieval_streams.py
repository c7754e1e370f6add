"""Training, validation and evaluation sequences of the retrieval task come from different streams."""

import pytest
from torch import Tensor

from diff_lab.data import RetrievalBatches

STEPS = 51  # 0 too: no step has that number, but a stream that was mixed up may begin there


def sequences(input_ids: Tensor) -> set[tuple[int, ...]]:
    return {tuple(row) for row in input_ids.tolist()}


@pytest.mark.parametrize("seed", [0, 1])
def test_no_sequence_is_in_two_streams(seed: int) -> None:
    batches = RetrievalBatches(batch_size=4, seed=seed, validation_sequences=48)
    trained = set[tuple[int, ...]]().union(*(sequences(batches.train_batch(s)["input_ids"]) for s in range(STEPS)))
    validation = set[tuple[int, ...]]().union(*(sequences(b["input_ids"]) for b in batches.validation_batches()))
    sampled = sequences(batches.sample(4, 0).input_ids) | sequences(batches.sample(4, 1).input_ids)
    assert (len(trained), len(validation), len(sampled)) == (4 * STEPS, 48, 8)
    assert trained.isdisjoint(validation)
    assert trained.isdisjoint(sampled)
    assert validation.isdisjoint(sampled)
