"""Blocks of documents against lists of tokens, and the permutation without a table."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from diff_lab.data.batches import flattened
from diff_lab.data.text_batches import Packed, shuffled


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(2, 7), st.integers(0, 3))
def test_blocks_are_windows_of_the_documents(lengths: list[int], length: int, gap: int) -> None:
    # Documents lie in the cache with gaps between them, as where others are kept for validation.
    begins = np.cumsum([0, *(size + gap for size in lengths[:-1])])
    cache = np.arange(sum(lengths) + gap * len(lengths), dtype=np.uint16)
    packed = Packed.of(cache, begins, np.array(lengths))
    stream = [(begin + offset, offset) for begin, size in zip(begins, lengths, strict=True) for offset in range(size)]
    assert len(packed) == len(stream)
    assert packed.blocks(length) == max(0, (len(stream) - 1) // (length - 1))
    for index in range(packed.blocks(length)):
        start = index * (length - 1)
        tokens, positions = packed.block(index, length)
        window = stream[start : start + length]
        assert tokens.tolist() == [token for token, _ in window]
        # A document that began before the block counts from the block's first token.
        first = window[0][1]
        cut = next((offset for offset, (_, position) in enumerate(window) if position == 0), length)
        expected = [position - first if offset < cut else position for offset, (_, position) in enumerate(window)]
        assert positions.tolist() == expected


def test_the_first_token_of_a_document_is_not_predicted() -> None:
    packed = Packed.of(np.arange(9, dtype=np.uint16), np.array([0, 4]), np.array([4, 5]))
    batch = packed.batch(np.array([0]), 8, isolated=True)
    assert batch["input_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert batch["labels"].tolist() == [[-100, 1, 2, 3, -100, 5, 6, 7]]
    joined = packed.batch(np.array([0]), 8, isolated=False)
    assert set(joined) == {"input_ids", "labels"}
    assert torch.equal(joined["labels"], batch["input_ids"])
    assert joined["labels"].data_ptr() != joined["input_ids"].data_ptr()
    assert flattened(joined).keys() == joined.keys(), "without documents it stays"


def test_a_permutation_meets_everything_once_depends_on_its_seed_and_has_no_pattern() -> None:
    for size in (1, 2, 3, 5, 64, 500):
        assert sorted(shuffled(index, size, (0, 1)) for index in range(size)) == list(range(size))
    orders = np.array(
        [[shuffled(index, 500, (seed, epoch)) for index in range(500)] for seed in (0, 1) for epoch in (0, 1)]
    )
    assert len({tuple(order) for order in orders}) == 4
    for order in orders:
        assert abs(np.corrcoef(order, np.arange(500))[0, 1]) < 0.15
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.15
    assert shuffled(7, 10**12, (0, 0)) < 10**12


def test_a_batch_as_one_row() -> None:
    packed = Packed.of(np.arange(13, dtype=np.uint16), np.array([0, 4, 9]), np.array([4, 5, 4]))
    batch = packed.batch(np.array([0, 1]), 6, isolated=True)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 0, 1]]
    row = flattened(batch)
    assert row["input_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10]]
    assert row["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 0, 1]]
    assert row["labels"].tolist() == [[-100, 1, 2, 3, -100, 5, -100, 6, 7, 8, -100, 10]]
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        assert row[name].dtype == torch.int32
        assert row[name].tolist() == [0, 4, 6, 10, 12, 12, 12, 12]
    assert row["max_length_q"] == row["max_length_k"] == 4
    # The other row by itself, as a process that shares the batch has it; what it came from is as it was.
    alone = flattened({name: tensor[1:] for name, tensor in batch.items()})
    assert alone["cu_seq_lens_q"].tolist() == [0, 4, 6, 6]
    assert batch["input_ids"].shape == (2, 6)


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=3))
def test_the_documents_of_a_row(rows: list[list[int]]) -> None:
    """Rows of one length, of documents of these lengths; labels that are not ignored anywhere."""
    width = max(map(sum, rows))
    lengths = [[*row, *([width - sum(row)] if sum(row) < width else [])] for row in rows]
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    tokens = torch.arange(positions.numel()).view_as(positions)
    row = flattened({"input_ids": tokens, "labels": tokens.clone(), "position_ids": positions})
    ends = row["cu_seq_lens_q"]
    assert [length for length in ends.diff().tolist() if length] == [length for sizes in lengths for length in sizes]
    assert len(ends) & (len(ends) - 1) == 0
    assert row["max_length_q"] == max(map(max, lengths))
    assert torch.equal(row["labels"], row["input_ids"].masked_fill(row["position_ids"] == 0, -100))
