"""Text batches: pure, split by document, and with the right number of bytes."""

import hashlib
import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from corpora import written
from diff_lab.data import TextBatches, TextFiles, byte_tokenizer, prepare, train_bpe
from diff_lab.data.corpus import DOCUMENT, document_row, split, training_text, validation_text
from diff_lab.data.text_batches import Packed

DOCUMENTS = [f"document {number}: " + "".join(random.Random(number).choices("abcdé ", k=60)) for number in range(40)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TextFiles:
    return written(DOCUMENTS, tmp_path_factory.mktemp("text"))


def text_batches(files: TextFiles, tokenizer: PreTrainedTokenizerFast | None = None, **settings: object) -> TextBatches:
    settings = {"length": 16, "batch_size": 4, "validation_fraction": 0.2} | settings
    tokenizer = tokenizer or byte_tokenizer()
    return TextBatches(prepare(files, tokenizer), tokenizer, **settings)  # type: ignore[arg-type]


def parts(documents: list[str], fraction: float) -> tuple[list[str], list[str]]:
    """Training and validation documents; nothing is cut."""
    training = split(np.array(list(map(document_row, documents)), dtype=DOCUMENT), fraction)
    assert all(size in (0, len(document.encode())) for size, document in zip(training, documents, strict=True))
    sides: tuple[list[str], list[str]] = ([], [])
    for document, size in zip(documents, training, strict=True):
        sides[int(size == 0)].append(document)
    return sides


def test_train_batch_is_a_pure_function_of_seed_and_step(files: TextFiles) -> None:
    first, second = text_batches(files, seed=3), text_batches(files, seed=3)
    for _ in range(5):
        first.train_batch(1)
    assert torch.equal(first.train_batch(7)["input_ids"], second.train_batch(7)["input_ids"])
    assert not torch.equal(first.train_batch(7)["input_ids"], first.train_batch(8)["input_ids"])
    other = text_batches(files, seed=4)
    assert not torch.equal(first.train_batch(7)["input_ids"], other.train_batch(7)["input_ids"])
    batch = first.train_batch(7)
    assert {name: tensor.shape for name, tensor in batch.items()} == dict.fromkeys(
        ("input_ids", "labels", "position_ids"), (4, 16)
    )
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    for one, two in zip(first.validation_batches(), other.validation_batches(), strict=True):
        assert torch.equal(one["input_ids"], two["input_ids"])


class Counted(np.ndarray):
    """Tokens that count how many of them are read."""

    read = 0

    def __getitem__(self, key: Any) -> Any:
        found = np.asarray(super().__getitem__(key))
        Counted.read += found.size
        return found


def test_a_rank_reads_its_own_rows_alone(files: TextFiles) -> None:
    """They are those of the whole batch, and no token of another rank's is looked at."""
    batches = text_batches(files, batch_size=6)
    packed = batches._train
    batches._train = Packed(packed.tokens.view(Counted), packed.begins, packed.ends)
    for step in (1, 9):
        whole = batches.train_batch(step)
        for rows in (slice(0, 2), slice(2, 4), slice(4, 6)):
            before = Counted.read
            own = batches.train_batch(step, rows)
            assert Counted.read - before == 2 * 16
            assert all(own[name].equal(whole[name][rows]) for name in whole)


def test_an_epoch_shows_every_training_token_once_in_another_order_each_time(files: TextFiles) -> None:
    batches = text_batches(files)
    blocks = (batches.train_tokens - 1) // 15

    def epoch(number: int) -> list[tuple[int, ...]]:
        rows = [tuple(row) for step in range(1, blocks + 1) for row in batches.train_batch(step)["input_ids"].tolist()]
        return rows[number * blocks : (number + 1) * blocks]

    assert sorted(epoch(0)) == sorted(epoch(1)) == sorted(epoch(2))
    assert epoch(0) != epoch(1)
    train = "".join(document + "§" for document in parts(DOCUMENTS, 0.2)[0])
    tokenizer = byte_tokenizer()
    stream = [token for text in train.split("§")[:-1] for token in [*tokenizer.encode(text), tokenizer.eos_token_id]]
    assert sorted(tuple(stream[15 * block : 15 * block + 16]) for block in range(blocks)) == sorted(epoch(0))


@pytest.mark.parametrize(("vocab_size", "isolated"), [(None, False), (280, True)])
def test_each_validation_token_is_a_target_once_and_its_bytes_are_counted(
    files: TextFiles, vocab_size: int | None, isolated: bool
) -> None:
    _, validation = parts(DOCUMENTS, 0.2)
    tokenizer = byte_tokenizer() if vocab_size is None else train_bpe(training_text(files, 0.2), vocab_size)
    batches = text_batches(files, tokenizer, length=8, batch_size=5, isolated=isolated)
    rows = [row.tolist() for batch in batches.validation_batches() for row in batch["labels"]]
    targets = [token for row in rows for token in row[1:]]
    end = tokenizer.eos_token_id
    documents = [[*tokenizer.encode(text), end] for text in validation]
    if isolated:  # a document's first token is not
        documents = [[-100, *tokens[1:]] for tokens in documents]
    stream = [token for tokens in documents for token in tokens]
    assert targets == stream[1 : len(targets) + 1]
    assert len(stream) - 1 - len(targets) < 7  # the rest that fills no block
    token_texts = [tokenizer.convert_ids_to_tokens(token) for token in targets if token not in (end, -100)]
    assert batches.validation_bytes == sum(map(len, token_texts))


def test_validation_is_in_small_batches(tmp_path: Path) -> None:
    """A training batch is divided among processes, a validation batch is not."""
    batches = text_batches(written(["word " * 20_000], tmp_path), length=8000, batch_size=9)
    assert [len(batch["input_ids"]) for batch in batches.validation_batches()] == [2]
    assert len(batches.train_batch(1)["input_ids"]) == 9


def test_fewer_validation_tokens_are_spread_over_the_text(files: TextFiles) -> None:
    everything = torch.cat([batch["input_ids"] for batch in text_batches(files).validation_batches()])
    some = text_batches(files, validation_tokens=64, isolated=False)
    chosen = torch.cat([batch["input_ids"] for batch in some.validation_batches()])
    assert chosen.shape == (4, 16)
    assert torch.equal(chosen[0], everything[0])
    assert torch.equal(chosen[-1], everything[-1])
    assert some.validation_bytes == 4 * 15 - (chosen[:, 1:] == 256).sum()


class TestSplit:
    def test_is_by_document_and_by_content_alone(self) -> None:
        train, validation = parts(DOCUMENTS, 0.2)
        sizes = [len(document.encode()) for document in DOCUMENTS]
        assert 0.1 < sum(len(document.encode()) for document in validation) / sum(sizes) <= 0.2
        shuffled = random.Random(0).sample(DOCUMENTS, k=len(DOCUMENTS))
        assert set(parts(shuffled, 0.2)[1]) == set(validation)
        more, _ = parts([*DOCUMENTS, "one more document " * 4], 0.2)
        assert len(set(train) - set(more)) <= 2  # other documents stay where they are, but for the edge

    def test_copies_stay_together(self) -> None:
        copies = list(itertools.chain.from_iterable([text] * 3 for text in DOCUMENTS))
        train, validation = parts(copies, 0.3)
        assert validation
        assert not set(train) & set(validation)
        assert len(train) + len(validation) == len(copies)

    @pytest.mark.parametrize("others", [[], [" \n"], ["short é"]])
    def test_one_document_is_cut(self, tmp_path: Path, others: list[str]) -> None:
        text = "é" + "".join(str(number % 10) for number in range(198))
        files = written([*others, text], tmp_path / "text" if (tmp_path / "text").mkdir() is None else tmp_path)
        assert "".join(training_text(files, 0.001)) == "".join(document.strip() for document in others) + text[:-1]
        batches = text_batches(files, length=2, validation_fraction=0.1, isolated=False)
        held_out = [batch["input_ids"] for batch in batches.validation_batches()]
        tokens = [*torch.cat(held_out)[:, 0].tolist(), int(held_out[-1][-1, -1])]
        short = [document.strip().encode() for document in others if document.strip()]  # fits, and is not enough
        held_out_size = round(0.1 * (len(b"".join(short)) + 200)) - len(b"".join(short))
        parts = [*short, text[-held_out_size:].encode()]
        assert tokens == list(itertools.chain.from_iterable([*part, 256] for part in parts))
        assert batches.train_tokens == 200 - held_out_size

    def test_about_the_fraction_is_held_out_whatever_the_sizes(self) -> None:
        """Of a few books, a readme and their copies too, and of the latter all alike."""
        random_numbers = np.random.default_rng(0)
        for _ in range(100):
            count = int(random_numbers.integers(1, 30))
            sizes = (10 ** random_numbers.uniform(3, 6, count)).astype(int)
            documents = np.array([(size, number) for number, size in enumerate(sizes)], dtype=DOCUMENT)
            documents["digest"] = random_numbers.integers(0, 2**63, count)
            documents = documents[random_numbers.integers(0, count, 2 * count)]
            fraction = float(random_numbers.choice([0.05, 0.2, 0.5]))
            training, total = split(documents, fraction), int(documents["bytes"].sum())
            assert 0.49 * fraction * total < total - training.sum() < fraction * total + len(documents)
            assert (training <= documents["bytes"]).all()
            order = random_numbers.permutation(len(documents))
            assert (split(documents[order], fraction) == training[order]).all()
            for digest in documents["digest"]:
                assert len(set(training[documents["digest"] == digest])) == 1

    def test_the_end_of_the_longest_document_is_held_out_of_its_copies(self, tmp_path: Path) -> None:
        text = "".join(random.Random(0).choices("abcdefgh", k=2000))
        files = written([text, "another one, short", text], tmp_path)
        assert text[-100:] in "".join(validation_text(files, 0.1))
        assert text[-50:] not in "".join(training_text(files, 0.1))


def test_all_of_the_corpus_can_be_kept_for_validation(files: TextFiles) -> None:
    batches = text_batches(files, length=8, batch_size=5, validation_fraction=1, isolated=False)
    tokenizer = byte_tokenizer()
    tokens = [token for batch in batches.validation_batches() for row in batch["labels"].tolist() for token in row[1:]]
    stream = [token for document in DOCUMENTS for token in [*tokenizer(document)["input_ids"], tokenizer.eos_token_id]]
    assert tokens == stream[1 : len(tokens) + 1]
    assert len(stream) - len(tokens) <= 8
    with pytest.raises(ValueError, match="no training text"):
        batches.train_batch(1)
    with pytest.raises(ValueError, match="validation part of the corpus has"):
        text_batches(files, length=1000)


# What the first version made of the same text.
@pytest.mark.parametrize(
    ("name", "fraction", "content", "source", "print_of"),
    [
        ("", 0.1, "c55abb9a84d288ddb00f19b2c26e30b7", "5018523bd8e83240459de8ed265a4bf2", "90c33c2cba5f3158"),
        ("c.txt", 0.2, "97c18affe88d6467ab3047ec47ef73e9", "6cf84d44f9b608f2213121365c68a86d", "dd3027be3a31cd65"),
    ],
    ids=["documents", "one document that is cut"],
)
def test_batches_are_what_they_always_were(
    tmp_path: Path, name: str, fraction: float, content: str, source: str, print_of: str
) -> None:
    lines = [json.dumps({"text": f"document {number}: " + "é word " * (number * 7 % 23)}) for number in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.txt").write_text("  ")
    (tmp_path / "c.txt").write_text("one more\n" * 30)
    files = TextFiles([tmp_path / name])
    assert files.fingerprint().startswith(print_of)
    data = text_batches(files, batch_size=3, seed=5, validation_fraction=fraction)
    digest = hashlib.sha256()
    for batch in [*(data.train_batch(step) for step in range(1, 300)), *data.validation_batches()]:
        for key in sorted(batch):
            digest.update(batch[key].numpy().tobytes())
    assert digest.hexdigest().startswith(content)
    assert data.source.startswith(source)
