"""Retrieval sequences hold what they promise, in the right places."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diff_transformer.data import RetrievalBatches, RetrievalSample


def check(task: RetrievalBatches, sample: RetrievalSample) -> None:
    """The invariants of a sample, row by row."""
    for row, labels, spans, queries, depths in zip(
        sample.input_ids.tolist(),
        sample.labels.tolist(),
        sample.answer_spans.tolist(),
        sample.query_positions.tolist(),
        sample.depth.tolist(),
        strict=True,
    ):
        assert len(row) == task.length
        assert all(0 <= token < task.vocab_size for token in row)
        context = row[: task.context_length]
        kinds = task.names(torch.tensor(context))
        assert sum(kind.startswith("k") for kind in kinds) == task.num_pairs
        assert sum(kind.startswith("v") for kind in kinds) == task.num_pairs
        assert "?" not in kinds
        assert len(spans) == len(queries) == task.num_queries
        for span, query, depth in zip(spans, queries, depths, strict=True):
            key, answer = row[query], row[query + 1]
            assert row[query - 1] == task.marker
            assert context.count(key) == 1
            assert context.index(key) == span - 1  # the value follows its key
            assert context[span] == answer
            assert task.first_key <= key < task.first_value <= answer < task.first_noise
            assert depth == pytest.approx((span - 1) / (task.context_length - 2))
            assert labels[query + 1] == answer  # the model shifts: predicted at `query`
        assert len({row[query] for query in queries}) == task.num_queries
        assert [place for place, label in enumerate(labels) if label != -100] == [query + 1 for query in queries]


@settings(deadline=None)
@given(
    num_pairs=st.integers(1, 6),
    asked=st.integers(1, 6),
    extra=st.integers(1, 30),
    vocabulary=st.tuples(st.integers(6, 9), st.integers(1, 9), st.integers(1, 9)),
    seed=st.integers(0, 2**32),
)
def test_invariants(num_pairs: int, asked: int, extra: int, vocabulary: tuple[int, int, int], seed: int) -> None:
    queries = min(asked, num_pairs)
    keys, values, noise = vocabulary
    task = RetrievalBatches(
        num_pairs,
        2 * num_pairs + 3 * queries + extra,
        num_queries=queries,
        num_keys=keys,
        num_values=values,
        num_noise=noise,
    )
    check(task, task.sample(5, seed))


def test_a_context_without_noise() -> None:
    task = RetrievalBatches(3, 3 * 2 + 3 * 3)
    sample = task.sample(50, seed=0)
    assert task.names(sample.input_ids[0])[:2][0].startswith("k")
    assert sample.answer_spans.sort(dim=1).values.tolist() == [[1, 3, 5]] * 50


def test_batches_are_pure_and_streams_do_not_meet() -> None:
    task, same, other = (RetrievalBatches(seed=seed, validation_sequences=40) for seed in (1, 1, 2))
    list(task.validation_batches())
    assert torch.equal(task.train_batch(3)["input_ids"], same.train_batch(3)["input_ids"])
    assert not torch.equal(task.train_batch(3)["input_ids"], task.train_batch(4)["input_ids"])
    assert not torch.equal(task.train_batch(3)["input_ids"], other.train_batch(3)["input_ids"])
    assert not torch.equal(task.train_batch(0)["input_ids"], task.sample(32, seed=1).input_ids)
    first, second = list(task.validation_batches()), list(other.validation_batches())
    assert [len(batch["input_ids"]) for batch in first] == [32, 8]
    for left, right in zip(first, second, strict=True):
        assert torch.equal(left["input_ids"], right["input_ids"])
        assert torch.equal(left["labels"], right["labels"])


def test_types_and_shapes() -> None:
    task = RetrievalBatches()
    batch = task.train_batch(1)
    assert set(batch) == {"input_ids", "labels"}
    assert batch["input_ids"].shape == batch["labels"].shape == (32, 128)
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    sample = task.sample(7, seed=0)
    assert sample.answer_spans.shape == sample.query_positions.shape == sample.depth.shape
    assert sample.depth.dtype == torch.float32


def test_needles_lie_everywhere() -> None:
    sample = RetrievalBatches(num_pairs=2, length=40).sample(4000, seed=0)
    counts = torch.histc(sample.depth, bins=4, min=0, max=1) / sample.depth.numel()
    assert torch.allclose(counts, torch.full((4,), 0.25), atol=0.03)
    assert sample.depth.min() == 0
    assert sample.depth.max() == 1


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="length=19 has no room for 4 pairs and 4 queries: these alone take 20"):
        RetrievalBatches(4, 19)
    with pytest.raises(ValueError, match="num_keys=3"):
        RetrievalBatches(4, num_keys=3)
    with pytest.raises(ValueError, match=r"num_queries .* got 5"):
        RetrievalBatches(4, num_queries=5)
    with pytest.raises(ValueError, match="at least 1"):
        RetrievalBatches(0)
