"""Recall sequences hold what they promise, in the right places."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diff_lab.data import RecallBatches
from diff_lab.data.recall_task import PAIR


@settings(deadline=None)
@given(
    pairs=st.integers(2, 24),
    questions=st.integers(1, 9),
    spare=st.integers(0, 9),
    seed=st.integers(0, 2**32),
)
def test_invariants(pairs: int, questions: int, spare: int, seed: int) -> None:
    tokens = math.ceil(math.sqrt(2 * pairs)) + spare
    task = RecallBatches(pairs, questions=questions, tokens=tokens)
    sample = task.sample(5, seed)
    assert sample.query_positions.shape == sample.answer_spans.shape == (5, min(questions, pairs))
    parts = (sample.input_ids, sample.labels, sample.query_positions, sample.answer_spans, sample.depth)
    for row, labels, queries, answers, depths in zip(*(part.tolist() for part in parts), strict=True):
        assert all(0 <= token < tokens for at, token in enumerate(row) if at % PAIR < 2)
        assert all(tokens <= value < 2 * tokens == task.vocab_size for value in row[2::PAIR])
        context = [tuple(row[at : at + 2]) for at in range(0, PAIR * pairs, PAIR)]
        assert len(set(context)) == pairs
        for part in zip(*context, strict=True):
            assert len(set(part)) <= math.ceil(math.sqrt(2 * pairs))  # others share it
        assert len(set(answers)) == len(answers)
        for query, answer, depth in zip(queries, answers, depths, strict=True):
            assert depth == pytest.approx((answer // PAIR) / (pairs - 1))
            assert row[query - 1 : query + 2] == row[answer - 2 : answer + 1]
            assert answer < PAIR * pairs <= query
        assert [at for at, label in enumerate(labels) if label != -100] == [query + 1 for query in queries]
        assert all(labels[query + 1] == row[query + 1] for query in queries)


def test_sequences_to_train_on_have_their_own_numbers_of_pairs() -> None:
    """As many below the geometric mean as above; and every question is about one of them."""
    task = RecallBatches(16, questions=4, tokens=16, batch_size=2000)
    batch = task.train_batch(1)
    assert batch["input_ids"].shape == (2000, task.length) == (2000, 60)
    places = batch["input_ids"].view(2000, -1, PAIR)
    asked = (batch["labels"].view(2000, -1, PAIR)[..., -1] != -100).sum(1)
    counts = 20 - asked
    assert set(counts.tolist()) == set(range(2, 17))
    assert (counts < math.sqrt(2 * 17)).float().mean() == pytest.approx(0.5, abs=0.05)
    for row, count in zip(places[:50].tolist(), counts[:50].tolist(), strict=True):
        assert all(pair in row[:count] for pair in row[count:])
        assert len({tuple(pair[:2]) for pair in row[:count]}) == count
    validation = next(task.validation_batches())["labels"]
    assert ((validation != -100).sum(1) == 4).all(), "those to validate with have as many as there may be"


@pytest.mark.parametrize("pairs", [1, 9])
def test_contexts_that_the_tokens_do_not_make(pairs: int) -> None:
    message = rf"^A context has 2 pairs or more, and of tokens=4 at most 8, got {pairs}\.$"
    with pytest.raises(ValueError, match=message):
        RecallBatches(pairs, tokens=4)
    with pytest.raises(ValueError, match=message):
        RecallBatches(8, tokens=4).sample(1, 0, pairs)
