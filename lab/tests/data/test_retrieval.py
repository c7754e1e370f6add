"""Retrieval sequences hold what they promise, in the right places."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diff_lab.data import RetrievalBatches, RetrievalSample


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
        kinds = [task.words()[token] for token in context]
        assert sum(kind.startswith("k") for kind in kinds) == task.num_pairs
        assert sum(kind.startswith("v") for kind in kinds) == task.num_pairs
        assert "?" not in kinds
        assert len(spans) == len(queries) == task.queries
        for span, query, depth in zip(spans, queries, depths, strict=True):
            key, answer = row[query], row[query + 1]
            assert row[query - 1] == task.marker
            assert context.count(key) == 1
            assert context.index(key) == span - 1  # the value follows its key
            assert context[span] == answer
            assert task.first_key <= key < task.first_value <= answer < task.first_noise
            assert depth == pytest.approx((span - 1) / (task.context_length - 2))
            assert labels[query + 1] == answer  # the model shifts: predicted at `query`
        assert len({row[query] for query in queries}) == task.queries
        assert [position for position, label in enumerate(labels) if label != -100] == [query + 1 for query in queries]


@settings(deadline=None)
@given(
    num_pairs=st.integers(1, 6),
    requested=st.integers(1, 6),
    extra=st.integers(1, 30),
    vocabulary=st.tuples(st.integers(6, 9), st.integers(1, 9), st.integers(1, 9)),
    seed=st.integers(0, 2**32),
)
def test_invariants(num_pairs: int, requested: int, extra: int, vocabulary: tuple[int, int, int], seed: int) -> None:
    queries = min(requested, num_pairs)
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
    assert task.words()[sample.input_ids[0, 0]].startswith("k")
    assert sample.answer_spans.sort(dim=1).values.tolist() == [[1, 3, 5]] * 50


def test_needles_lie_everywhere() -> None:
    sample = RetrievalBatches(num_pairs=2, length=40).sample(4000, seed=0)
    counts = torch.histc(sample.depth, bins=4, min=0, max=1) / sample.depth.numel()
    assert torch.allclose(counts, torch.full((4,), 0.25), atol=0.03)
    assert sample.depth.min() == 0
    assert sample.depth.max() == 1


def test_repeated_queries_may_be_more_than_pairs() -> None:
    task = RetrievalBatches(2, 60, num_queries=9, repeats=True, num_keys=4, num_values=4)
    sample = task.sample(20, 0)
    rows = torch.arange(20)[:, None]
    keys = sample.input_ids[rows, sample.query_positions]
    assert sample.input_ids[rows, sample.answer_spans].equal(sample.input_ids[rows, sample.query_positions + 1])
    assert sample.input_ids[rows, sample.answer_spans - 1].equal(keys)
    assert {len(set(row)) for row in keys.tolist()} <= {1, 2}


def test_varied_numbers_of_pairs() -> None:
    """Training sequences have 1 to 4 pairs, as many of each, and only these are asked for."""
    task = RetrievalBatches(4, 60, num_queries=6, repeats=True, vary=True, batch_size=400)
    ids = task.train_batch(1)["input_ids"]
    context, queries = ids[:, : task.context_length], ids[:, task.context_length :].reshape(400, 6, 3)
    is_key = (context >= task.first_key) & (context < task.first_value)
    counts = is_key.sum(1)
    assert ((context >= task.first_value) & (context < task.first_noise)).sum(1).equal(counts)
    assert all(70 < int((counts == count).sum()) < 130 for count in (1, 2, 3, 4))
    for row, keys, row_queries in zip(context.tolist(), is_key, queries.tolist(), strict=True):
        shown = {row[position]: row[position + 1] for position in keys.nonzero().flatten().tolist()}
        assert all(marker == task.marker and shown[key] == value for marker, key, value in row_queries)
    first = is_key.float().argmax(1)[counts == 1].float()  # one needle alone is anywhere
    assert abs(first.mean().item() - (task.context_length - 2) / 2) < 4
    validation = next(iter(task.validation_batches()))["input_ids"][:, : task.context_length]
    assert (((validation >= task.first_key) & (validation < task.first_value)).sum(1) == 4).all()


def test_the_same_task_with_another_number_of_queries() -> None:
    task = RetrievalBatches(4, 60, num_queries=6, repeats=True, num_keys=9, num_values=7, num_noise=5)
    other = task.asking(2)
    assert (other.num_pairs, other.num_queries, other.repeats) == (4, 2, False)
    assert (other.context_length, other.vocab_size) == (task.context_length, task.vocab_size)
    check(other, other.sample(5, 0))
