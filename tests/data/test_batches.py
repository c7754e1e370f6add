"""Text batches: pure, split by document, and with the right number of bytes."""

import itertools
import random

import pytest
import torch

from diff_transformer.data import TextBatches, byte_tokenizer, split_documents, train_bpe

DOCUMENTS = [f"document {number}: " + "".join(random.Random(number).choices("abcdé ", k=60)) for number in range(40)]


def text_batches(**settings: object) -> TextBatches:
    settings = {"length": 16, "batch_size": 4, "validation_fraction": 0.2} | settings
    return TextBatches(DOCUMENTS, byte_tokenizer(), **settings)  # type: ignore[arg-type]


def test_train_batch_is_a_pure_function_of_seed_and_step() -> None:
    first, second = text_batches(seed=3), text_batches(seed=3)
    for _ in range(5):
        first.train_batch(1)
    list(first.validation_batches())
    assert torch.equal(first.train_batch(7)["input_ids"], second.train_batch(7)["input_ids"])
    assert not torch.equal(first.train_batch(7)["input_ids"], first.train_batch(8)["input_ids"])
    assert not torch.equal(first.train_batch(7)["input_ids"], text_batches(seed=4).train_batch(7)["input_ids"])


def test_shapes_and_labels() -> None:
    batch = text_batches().train_batch(1)
    assert set(batch) == {"input_ids", "labels"}
    assert batch["input_ids"].shape == (4, 16)
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert batch["input_ids"].data_ptr() != batch["labels"].data_ptr()


def test_training_windows_come_from_training_documents_alone() -> None:
    tokenizer = byte_tokenizer()
    train, validation = split_documents(DOCUMENTS, 0.2)
    joined = [tokenizer.eos_token.join(part) + tokenizer.eos_token for part in (train, validation)]
    batches = text_batches()
    drawn = [tokenizer.decode(row) for step in range(20) for row in batches.train_batch(step)["input_ids"]]
    assert all(window.strip("\ufffd") in joined[0] for window in drawn)  # a window may cut an é in half
    assert any(tokenizer.eos_token in window for window in drawn)
    fixed = [tokenizer.decode(row) for batch in batches.validation_batches() for row in batch["input_ids"]]
    assert all(window.strip("\ufffd") in joined[1] for window in fixed)


def test_validation_does_not_depend_on_the_seed() -> None:
    for first, second in zip(
        text_batches(seed=1).validation_batches(), text_batches(seed=2).validation_batches(), strict=True
    ):
        assert torch.equal(first["input_ids"], second["input_ids"])


@pytest.mark.parametrize("vocab_size", [None, 280])
def test_each_validation_token_is_a_target_once_and_its_bytes_are_counted(vocab_size: int | None) -> None:
    train, validation = split_documents(DOCUMENTS, 0.2)
    tokenizer = byte_tokenizer() if vocab_size is None else train_bpe(train, vocab_size)
    batches = TextBatches(DOCUMENTS, tokenizer, length=8, batch_size=5, validation_fraction=0.2)
    rows = [row.tolist() for batch in batches.validation_batches() for row in batch["labels"]]
    targets = [token for row in rows for token in row[1:]]
    whole = [token for text in validation for token in [*tokenizer.encode(text), tokenizer.eos_token_id]]
    assert targets == whole[1 : len(targets) + 1]
    assert len(whole) - 1 - len(targets) < 7  # the rest that fills no window
    pieces = [tokenizer.convert_ids_to_tokens(token) for token in targets if token != tokenizer.eos_token_id]
    assert batches.validation_bytes == sum(map(len, pieces))


def test_fewer_validation_tokens_are_spread_over_the_text() -> None:
    rows = [batch["input_ids"] for batch in text_batches().validation_batches()]
    some = text_batches(validation_tokens=64)
    chosen = torch.cat([batch["input_ids"] for batch in some.validation_batches()])
    everything = torch.cat(rows)
    assert chosen.shape == (4, 16)
    assert torch.equal(chosen[0], everything[0])
    assert torch.equal(chosen[-1], everything[-1])
    assert some.validation_bytes == 4 * 15 - (chosen[:, 1:] == 256).sum()


class TestSplit:
    def test_is_by_document_and_by_content_alone(self) -> None:
        train, validation = split_documents(DOCUMENTS, 0.2)
        assert sorted(train + validation) == sorted(DOCUMENTS)
        assert 0.1 < sum(map(len, validation)) / sum(map(len, DOCUMENTS)) <= 0.2
        shuffled = random.Random(0).sample(DOCUMENTS, k=len(DOCUMENTS))
        assert set(split_documents(shuffled, 0.2)[1]) == set(validation)
        more, _ = split_documents([*DOCUMENTS, "one more document " * 4], 0.2)
        assert len(set(train) - set(more)) <= 2  # other documents stay where they are, but for the edge

    def test_copies_stay_together(self) -> None:
        copies = list(itertools.chain.from_iterable([text] * 3 for text in DOCUMENTS))
        train, validation = split_documents(copies, 0.3)
        assert validation
        assert not set(train) & set(validation)
        assert len(train) + len(validation) == len(copies)

    def test_one_document_is_cut(self) -> None:
        text = "".join(str(number % 10) for number in range(200))
        assert split_documents([text], 0.1) == ([text[:180]], [text[180:]])

    @pytest.mark.parametrize("fraction", [0, 1.1, -0.1, float("nan")])
    def test_bad_fraction(self, fraction: float) -> None:
        with pytest.raises(ValueError, match="validation_fraction"):
            split_documents(DOCUMENTS, fraction)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="validation part of the corpus has"):
        text_batches(length=1000)
    with pytest.raises(ValueError, match="length=1"):
        text_batches(length=1)
    with pytest.raises(ValueError, match="batch_size=0"):
        text_batches(batch_size=0)


def test_all_of_the_corpus_can_be_kept_for_validation() -> None:
    tokenizer = byte_tokenizer()
    batches = TextBatches(DOCUMENTS, tokenizer, length=8, batch_size=5, validation_fraction=1)
    tokens = [token for batch in batches.validation_batches() for row in batch["labels"].tolist() for token in row[1:]]
    whole = [token for document in DOCUMENTS for token in [*tokenizer(document)["input_ids"], tokenizer.eos_token_id]]
    assert tokens == whole[1 : len(tokens) + 1]
    assert len(whole) - len(tokens) <= 8
    with pytest.raises(ValueError, match="no training text"):
        batches.train_batch(1)
