"""Hidden tokens: how many, which, and what stands in their place."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diff_lab.data import MaskedTextBatches, TextBatches, TextFiles, byte_tokenizer, prepare, with_mask_token

END, MASK = 256, 257


def text_batches(folder: Path, **settings: Any) -> TextBatches:
    file = folder / "text.jsonl"
    file.write_text("".join(f'{{"text": "document {n} says to be or not to be"}}\n' for n in range(300)), "utf-8")
    tokenizer = with_mask_token(byte_tokenizer())
    cache = prepare(TextFiles([file]), tokenizer)
    return TextBatches(cache, tokenizer, **{"length": 64, "batch_size": 16, "validation_fraction": 0.2, **settings})


@pytest.fixture
def text(tmp_path: Path) -> TextBatches:
    return text_batches(tmp_path)


def masked(text: TextBatches, **settings: Any) -> MaskedTextBatches:
    return MaskedTextBatches(text, with_mask_token(byte_tokenizer()), **settings)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@pytest.mark.parametrize(("isolated", "fraction"), [(True, 0.15), (False, 0.3), (True, 1.0)])
def test_what_is_hidden(tmp_path: Path, isolated: bool, fraction: float) -> None:
    """The share of each block, without first tokens and ends of text; a label is the token that stood there."""
    text = text_batches(tmp_path, isolated=isolated)
    batches = masked(text, mask_fraction=fraction)
    for step in (1, 2):
        batch, original = batches.train_batch(step), text.train_batch(step)
        assert ("position_ids" in batch) == isolated
        found = batch["labels"] != -100
        assert batch["labels"][found].equal(original["input_ids"][found])
        assert batch["input_ids"][~found].equal(original["input_ids"][~found])
        eligible = (original["labels"] != -100) & (original["input_ids"] != END)
        eligible[:, 0] = False
        assert not (found & ~eligible).any()
        assert found.sum(1).equal((fraction * eligible.sum(1)).round().long())


def test_what_stands_in_its_place(text: TextBatches) -> None:
    """Eight in ten the mask, one in ten another token, never a special one, one in ten the token itself."""
    batches, fates, others = masked(text, mask_fraction=0.5), torch.zeros(3), set()
    for step in range(1, 21):
        batch = batches.train_batch(step)
        found = batch["labels"] != -100
        shown, label = batch["input_ids"][found], batch["labels"][found]
        is_mask, is_kept = shown == MASK, shown == label
        fates += torch.stack([is_mask.sum(), (~is_mask & ~is_kept).sum(), is_kept.sum()])
        others |= set(shown[~is_mask & ~is_kept].tolist())
    assert (fates / fates.sum()).tolist() == pytest.approx([0.8, 0.1, 0.1], abs=0.02)
    assert len(others) > 200
    assert max(others) < END


def test_a_batch_is_a_function_of_seed_and_step(text: TextBatches) -> None:
    first = masked(text, seed=1).train_batch(3)
    assert same(first, masked(text, seed=1).train_batch(3))
    rows = slice(4, 8)
    assert same(masked(text, seed=1).train_batch(3, rows), {name: x[rows] for name, x in first.items()})
    other = masked(text, seed=2).train_batch(3)
    assert not other["labels"].equal(first["labels"])
    # Nothing that is hidden depends on the seed in validation, or on the call.
    one, two = masked(text, seed=1), masked(text, seed=2)
    expected = list(one.validation_batches())
    for batches in (one, two):
        assert all(same(a, b) for a, b in zip(batches.validation_batches(), expected, strict=True))
    assert not expected[0]["labels"].equal(expected[0]["input_ids"])


def test_a_row_always_has_something_to_find(text: TextBatches) -> None:
    batch = masked(text, mask_fraction=0.001).train_batch(1)
    assert (batch["labels"] != -100).sum(1).tolist() == [1] * 16


def test_the_mask_token(tmp_path: Path) -> None:
    """It is added once, kept where there is one, and plain text where a document holds its letters."""
    tokenizer = with_mask_token(byte_tokenizer())
    assert (tokenizer.mask_token_id, len(tokenizer)) == (MASK, MASK + 1)
    own = byte_tokenizer()
    own.add_special_tokens({"mask_token": "[M]"})
    assert with_mask_token(own).mask_token == "[M]"
    file = tmp_path / "text.txt"
    file.write_text("<|mask|>" * 200, "utf-8")
    tokens = prepare(TextFiles([file]), tokenizer).tokens
    assert MASK not in tokens
    assert tokens[0] == ord("<")
