"""Generated sequences depend on seed, purpose and step alone, and no two purposes share any."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from diff_lab.data import ArithmeticBatches, ManyShotBatches, RecallBatches, RetrievalBatches
from diff_lab.data.batches import GeneratedBatches

Make = Callable[..., GeneratedBatches]
MAKERS = {
    "retrieval": lambda seed, **settings: RetrievalBatches(seed=seed, validation_sequences=40, **settings),
    "recall": lambda seed, **settings: RecallBatches(seed=seed, validation_sequences=40, **settings),
    "many_shot": lambda seed, **settings: ManyShotBatches(8, seed=seed, validation_sequences=40, **settings),
    "arithmetic": lambda seed, **settings: ArithmeticBatches(seed=seed, validation_problems=40, **settings),
}


def rows(batches: list[dict[str, torch.Tensor]]) -> set[tuple[int, ...]]:
    return {tuple(row) for batch in batches for row in batch["input_ids"].tolist()}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_batch_is_a_function_of_seed_and_step(make: Make) -> None:
    task = make(1, batch_size=32)
    first = task.train_batch(3)
    assert {tensor.dtype for tensor in first.values()} == {torch.int64}
    list(task.validation_batches())
    for name, tensor in make(1, batch_size=32).train_batch(3).items():
        assert tensor.equal(first[name])
    for name, tensor in task.train_batch(3, slice(8, 16)).items():
        assert tensor.equal(first[name][8:16])
    assert not first["input_ids"].equal(task.train_batch(4)["input_ids"])
    assert not first["input_ids"].equal(make(2, batch_size=32).train_batch(3)["input_ids"])
    validation = list(task.validation_batches())
    assert [len(batch["input_ids"]) for batch in validation] == [32, 8]
    for one, other in zip(validation, make(2, batch_size=32).validation_batches(), strict=True):
        assert all(one[name].equal(other[name]) for name in one)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_no_sequence_is_trained_on_and_validated_with(make: Make) -> None:
    task = make(0, batch_size=4)
    # Step 0 too: no step has that number, but a stream that was mixed up may begin there.
    trained, validation = rows([task.train_batch(step) for step in range(51)]), rows(list(task.validation_batches()))
    assert trained.isdisjoint(validation)
    if isinstance(task, RetrievalBatches | RecallBatches):
        sampled = {tuple(row) for seed in (0, 1) for row in task.sample(4, seed).input_ids.tolist()}
        assert (len(trained), len(validation), len(sampled)) == (4 * 51, 40, 8)
        assert sampled.isdisjoint(trained | validation)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RetrievalBatches(4, 19), "length=19 has no room for 4 pairs and 4 queries: these alone take 20"),
        (lambda: RetrievalBatches(4, num_keys=3), "num_keys=3"),
        (lambda: RetrievalBatches(0), "num_pairs must be at least 1, got num_pairs=0"),
        (lambda: RetrievalBatches(4, 60, vary=True), "needs repeats"),
        (lambda: ManyShotBatches(classes=1), "classes=1"),
        (lambda: ManyShotBatches(words=5), "words=5"),
        (lambda: ArithmeticBatches(4, 10), "length=10 has no room for 4 operations"),
    ],
)
def test_settings_that_do_not_fit(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
