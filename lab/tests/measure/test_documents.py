"""AR-hit and the loss by position: against their definitions, written out, for our models and transformers' own."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM

from corpora import written
from diff_lab.data import TextBatches, byte_tokenizer, prepare
from diff_lab.measure.document_losses import (
    bigrams,
    chosen_documents,
    frequent_bigrams,
    position_losses,
    repeat_losses,
    repeated,
    token_losses,
)
from diff_lab.measure.measurement import EvalInput, MeasurementRequest
from diff_lab.record import Result
from diff_transformer.model import DiffTransformerConfig, DiffTransformerForCausalLM
from tiny_model import KINDS

VOCABULARY = 260
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "num_noise_heads": 1, "initializer_range": 0.5, "max_position_embeddings": 128}
TEXT = [f"document {number}: the cat, the dog and the {number} other cats. " * (3 + number % 4) for number in range(24)]


def a_model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    if kind == "diffllama":
        return DiffLlamaForCausalLM(DiffLlamaConfig(**SIZES)).eval()
    return DiffTransformerForCausalLM(DiffTransformerConfig(attention_type=kind, **SIZES)).eval()


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> TextBatches:
    folder = tmp_path_factory.mktemp("text")
    cache = prepare(written(TEXT, folder), byte_tokenizer())
    return TextBatches(cache, byte_tokenizer(), length=48, batch_size=3, validation_fraction=0.4)


def row_losses(model: Any, row: np.ndarray) -> list[float]:
    with torch.no_grad():
        log = model(input_ids=torch.tensor(row.astype(np.int64))[None]).logits[0].double().log_softmax(-1)
    return [-log[position, int(row[position + 1])].item() for position in range(len(row) - 1)]


@pytest.mark.parametrize("kind", [*KINDS, "llama", "diffllama"])
def test_losses_of_rows_of_other_lengths(kind: str) -> None:
    """Rows that stand together, the shorter ones with something after their end."""
    model, random = a_model(kind), np.random.default_rng(0)
    rows = [random.integers(1, VOCABULARY, size=size) for size in (5, 17, 2, 17, 9)]
    for row, losses in zip(rows, token_losses(model, rows), strict=True):
        assert losses == pytest.approx(row_losses(model, row), rel=1e-4, abs=1e-5)


def test_a_token_that_the_model_has_not() -> None:
    with pytest.raises(ValueError, match=r"has the token 260, and the model has 260 tokens\.$"):
        token_losses(a_model("softmax"), [np.array([3, 260])])


def test_documents_are_spread_evenly() -> None:
    documents = [np.arange(size) for size in (9, 2, 8, 7, 6, 1, 5)]
    assert [len(document) for document in chosen_documents(documents, 5, 3)] == [9, 7, 5]
    assert [len(document) for document in chosen_documents(documents, 5, 30)] == [9, 8, 7, 6, 5]
    with pytest.raises(ValueError, match=r"two documents of 9 tokens or more, and of 7 the longest has 9:"):
        chosen_documents(documents, 9, 3)


def hits_by_definition(row: list[int]) -> list[bool]:
    """For each token but the first: some s < t with x_(s−1) = x_(t−1) and x_s = x_t."""
    return [any((row[s - 1], row[s]) == (row[t - 1], row[t]) for s in range(1, t)) for t in range(1, len(row))]


@pytest.mark.parametrize("seed", range(3))
def test_hits_are_those_of_the_definition(seed: int) -> None:
    row = np.random.default_rng(seed).integers(0, 6, size=40).astype(np.uint16)
    hits = repeated(bigrams(row))
    assert hits.tolist() == hits_by_definition(row.tolist())
    assert 0 < hits.sum() < len(hits)


@pytest.mark.parametrize("chunk", [1, 3, 1 << 24])
def test_frequent_bigrams(chunk: int) -> None:
    """Counted within documents, never across the end of one, in parts of any size."""
    documents = [np.array(list(text.encode()), dtype=np.uint16) for text in ("abab", "ba", "abc", "b", "ab")]
    pair = {name: int(bigrams(np.array([ord(c) for c in name]))[0]) for name in ("ab", "ba", "bc")}
    assert frequent_bigrams(documents, 3, chunk).tolist() == [pair["ab"]]
    assert sorted(frequent_bigrams(documents, 1, chunk)) == sorted([pair["ab"], pair["ba"]])
    assert len(frequent_bigrams(documents, 4, chunk)) == 0


@pytest.mark.parametrize("kind", ["diff", "softmax", "llama"])
def test_repeat_losses_by_definition(kind: str) -> None:
    model, random, length = a_model(kind), np.random.default_rng(1), 9
    documents = [random.integers(1, 5, size=size).astype(np.uint16) for size in (21, 9, 2, 10)]
    frequent = frequent_bigrams(documents, 3)
    assert 0 < len(frequent) < 16
    parts = repeat_losses(model, documents, frequent, length)
    for number, document in enumerate(documents):
        expected = {"hit": [0.0, 0], "other": [0.0, 0]}
        for start in range(0, len(document) - 1, length - 1):
            row = document[start : start + length]
            for position, (loss, hit) in enumerate(
                zip(row_losses(model, row), hits_by_definition(row.tolist()), strict=True)
            ):
                rare = int(row[position]) << 32 | int(row[position + 1])
                name = "hit" if hit and rare not in frequent else "other"
                expected[name][0] += loss
                expected[name][1] += 1
        for name, (total, count) in expected.items():
            assert parts[name][number].tolist() == pytest.approx((total, count), rel=1e-4)
    assert sum(count for part in parts.values() for _, count in part) == sum(
        len(document) - 1 for document in documents
    )


def records_of(name: str, model: Any, batches: TextBatches, seed: int = 0, **options: Any) -> list[Result]:
    measured = EvalInput(model=model, variant=model.config.attention_type, batches=batches, seed=seed)
    return MeasurementRequest(name=name, options=options).run(measured)


def test_repeat_records(batches: TextBatches) -> None:
    model = a_model("diff")
    records = {record.name: record for record in records_of("repeats", model, batches, seed=3, frequent=30)}
    assert records.keys() == {"repeats/loss", "repeats/ar_hit", "repeats/other", "repeats/share"}
    hit, other, loss = (records[f"repeats/{name}"] for name in ("ar_hit", "other", "loss"))
    assert loss.n == hit.n + other.n == sum(len(document) - 1 for document in batches.documents())
    assert loss.value == pytest.approx((hit.value * hit.n + other.value * other.n) / loss.n)
    assert records["repeats/share"].value == hit.n / loss.n
    for record in (hit, other, loss):
        assert (record.variant, record.seed, record.better, record.unit) == ("diff", 3, "lower", "nats/token")
        assert len(record.documents) == len(list(batches.documents()))
        assert record.interval[0] < record.value < record.interval[1]
    fewer = {record.name: record for record in records_of("repeats", model, batches, frequent=3)}
    assert fewer["repeats/ar_hit"].n < hit.n
    assert fewer["repeats/loss"].value == loss.value
    with pytest.raises(
        ValueError, match=r"is a 'hit' token where bigrams that occur more than 1 times in the text are no hits: "
    ):
        records_of("repeats", model, batches, frequent=1, length=2)


@pytest.mark.parametrize("kind", ["diff", "diffllama"])
def test_position_losses_by_definition(kind: str) -> None:
    model, random = a_model(kind), np.random.default_rng(2)
    documents = [random.integers(1, VOCABULARY, size=size).astype(np.uint16) for size in (20, 9, 17)]
    sums = position_losses(model, documents, 8, windows=2)
    assert sums.shape == (3, 7, 2)
    for number, windows in ((0, 2), (1, 1), (2, 2)):
        expected = [row_losses(model, documents[number][8 * window : 8 * window + 8]) for window in range(windows)]
        assert sums[number, :, 0] == pytest.approx(np.sum(expected, axis=0), rel=1e-4)
        assert (sums[number, :, 1] == windows).all()


def test_position_records(batches: TextBatches) -> None:
    model = a_model("softmax")
    records = records_of("positions", model, batches, seed=1, first=8)
    by_label = {(record.name, record.coordinates.label): record for record in records}
    assert list(by_label) == [
        (f"positions/{name}", label)
        for pair in ((8, "1–7"), (16, "8–15"), (32, "16–31"), (48, "32–47"))
        for name, label in (("cumulative_loss", f"first {pair[0]} tokens"), ("loss", f"position {pair[1]}"))
    ]
    overall, parts = (
        by_label["positions/cumulative_loss", "first 48 tokens"],
        [r for r in records if r.name == "positions/loss"],
    )
    assert overall.n == sum(part.n for part in parts)
    assert overall.value == pytest.approx(sum(part.value * part.n for part in parts) / overall.n)
    assert overall.interval[0] < overall.value < overall.interval[1]
    assert all(len(record.documents) == len(overall.documents) for record in records)
    # The first validation document, by the definition.
    first = records[0].documents[0]
    row = next(batches.documents())
    assert first == pytest.approx((sum(row_losses(model, row[:8])), 7), rel=1e-4)
    with pytest.raises(ValueError, match=r"first must lie in 2 … length = 48, got 49\.$"):
        records_of("positions", model, batches, first=49)
    with pytest.raises(ValueError, match="two documents of 4000 tokens or more"):
        records_of("positions", model, batches, length=4000)
