"""Recall sequences hold what they promise, in the right places."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diff_lab.data import RecallBatches
from diff_lab.data.recall_task import PAIR, SHORTEST


@settings(deadline=None)
@given(pairs=st.integers(2, 24), questions=st.integers(1, 9), spare=st.integers(0, 9), seed=st.integers(0, 2**32))
def test_invariants(pairs: int, questions: int, spare: int, seed: int) -> None:
    tokens = pairs + spare
    task = RecallBatches(pairs, questions=questions, tokens=tokens)
    sample = task.sample(5, seed)
    assert sample.query_positions.shape == sample.answer_spans.shape == (5, min(questions, pairs))
    parts = (sample.input_ids, sample.labels, sample.query_positions, sample.answer_spans, sample.depth)
    for row, labels, queries, answers, depths in zip(*(part.tolist() for part in parts), strict=True):
        assert all(0 <= key < tokens for key in row[::PAIR])
        assert all(tokens <= value < 2 * tokens == task.vocab_size for value in row[1::PAIR])
        assert len(set(row[: PAIR * pairs : PAIR])) == pairs
        assert len(set(answers)) == len(answers)
        for query, answer, depth in zip(queries, answers, depths, strict=True):
            assert depth == pytest.approx((answer // PAIR) / (pairs - 1))
            assert row[query : query + 2] == row[answer - 1 : answer + 1]
            assert answer < PAIR * pairs <= query
        assert [at for at, label in enumerate(labels) if label != -100] == [query + 1 for query in queries]
        assert all(labels[query + 1] == row[query + 1] for query in queries)


def test_sequences_to_train_on_have_their_own_lengths_and_numbers_of_pairs() -> None:
    """As many lengths below the geometric mean as above; and every question is about a pair of the context."""
    task = RecallBatches(16, questions=4, tokens=16, batch_size=50)
    batches = [task.train_batch(step) for step in range(1, 401)]
    lengths = torch.tensor([batch["input_ids"].shape[1] // PAIR for batch in batches])
    assert set(lengths.tolist()) == set(range(SHORTEST, 21))
    assert (lengths < math.sqrt(SHORTEST * 21)).float().mean() == pytest.approx(0.5, abs=0.06)
    for batch, length in zip(batches[:50], lengths.tolist(), strict=False):
        counts = length - (batch["labels"] != -100).sum(1)
        assert batch["input_ids"].shape == (50, PAIR * length)
        assert 2 <= counts.min() <= counts.max() <= max(2, min(16, 2 * length // 3))
        for row, count in zip(batch["input_ids"].view(50, -1, PAIR).tolist(), counts.tolist(), strict=True):
            assert all(pair in row[:count] for pair in row[count:])
            assert len({key for key, _ in row[:count]}) == count
    validation = next(task.validation_batches())["labels"]
    assert validation.shape == (50, task.length)
    assert ((validation != -100).sum(1) == 4).all(), "those to validate with have as many as there may be"


@pytest.mark.parametrize("pairs", [1, 9])
def test_contexts_that_the_tokens_do_not_make(pairs: int) -> None:
    message = rf"^A context has 2 pairs or more, and at most tokens=8, got pairs={pairs}\.$"
    with pytest.raises(ValueError, match=message):
        RecallBatches(pairs, tokens=8)
    with pytest.raises(ValueError, match=message):
        RecallBatches(8, tokens=8).sample(1, 0, pairs)
