"""AR-hit and the loss by position: against their definitions, written out, for our models and transformers' own."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from any_model import any_model
from corpora import written
from diff_lab.data import TextBatches, byte_tokenizer, prepare
from diff_lab.measure import document_losses
from diff_lab.measure.document_losses import CUMULATIVE_LOSS, bigrams, chosen_documents, frequent_bigrams, token_losses
from diff_lab.measure.measurement import EvalInput, MeasurementRequest
from diff_lab.record import Result
from tiny_model import KINDS

VOCABULARY = 260
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "num_noise_heads": 1, "initializer_range": 0.5, "max_position_embeddings": 128}
TEXT = [f"document {number}: the cat, the dog and the {number} other cats. " * (3 + number % 4) for number in range(24)]


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> TextBatches:
    folder = tmp_path_factory.mktemp("text")
    cache = prepare(written(TEXT, folder), byte_tokenizer())
    return TextBatches(cache, byte_tokenizer(), length=48, batch_size=3, validation_fraction=0.4)


def row_losses(model: Any, row: np.ndarray) -> list[float]:
    with torch.no_grad():
        log = model(input_ids=torch.tensor(row.astype(np.int64))[None]).logits[0].double().log_softmax(-1)
    return [-log[position, int(row[position + 1])].item() for position in range(len(row) - 1)]


def of_documents(parts: Sequence[Sequence[float]]) -> Any:
    return pytest.approx(np.array(parts), rel=1e-4, abs=1e-5)


def test_a_token_that_the_model_has_not() -> None:
    with pytest.raises(ValueError, match=r"has the token 260, and the model has 260 tokens\.$"):
        token_losses(any_model("softmax", **SIZES), [np.array([3, 260])])


def test_documents_are_spread_evenly() -> None:
    documents = [np.arange(size) for size in (9, 2, 8, 7, 6, 1, 5)]
    assert [len(document) for document in chosen_documents(documents, 5, 3)] == [9, 7, 5]
    assert [len(document) for document in chosen_documents(documents, 5, 30)] == [9, 8, 7, 6, 5]
    with pytest.raises(ValueError, match=r"two documents of 9 tokens or more, and of 7 the longest has 9:"):
        chosen_documents(documents, 9, 3)


def records_of(name: str, model: Any, batches: TextBatches, **options: Any) -> list[Result]:
    measured = EvalInput(model=model, variant="mine", batches=batches, seed=3)
    return MeasurementRequest(name=name, options=options).run(measured)


@pytest.mark.parametrize("kind", [*KINDS, "llama", "diffllama"])
def test_repeats_by_definition(kind: str, batches: TextBatches) -> None:
    """A hit completes a pair that stands earlier in its context, and at most so often in the training text."""
    model, most, length, longest = any_model(kind, **SIZES), 30, 48, 100
    pairs = [pair for document in batches.documents(training=True) for pair in pairwise(document.tolist())]
    frequent = {pair for pair, count in Counter(pairs).items() if count > most}
    parts: dict[str, list[list[float]]] = {"ar_hit": [], "other": []}
    for document in batches.documents():
        sums: dict[str, list[float]] = {name: [0.0, 0] for name in parts}
        for start in range(0, min(len(document), longest) - 1, length - 1):
            row = document[start : min(start + length, longest)]
            of_row = list(pairwise(row.tolist()))
            for number, (pair, loss) in enumerate(zip(of_row, row_losses(model, row), strict=True)):
                name = "ar_hit" if pair in of_row[:number] and pair not in frequent else "other"
                sums[name] = [sums[name][0] + loss, sums[name][1] + 1]
        for name, both in sums.items():
            parts[name].append(both)
    parts["loss"] = np.sum([parts["ar_hit"], parts["other"]], axis=0).tolist()
    records = {one.name: one for one in records_of("repeats", model, batches, frequent=most, longest=longest)}
    share = records.pop("repeats/share")
    assert records.keys() == {f"repeats/{name}" for name in parts}
    for name, of_each in parts.items():
        record = records[f"repeats/{name}"]
        total, count = np.sum(of_each, axis=0)
        assert np.array(record.documents) == of_documents(of_each)
        assert (record.variant, record.seed, record.better, record.unit) == ("mine", 3, "lower", "nats/token")
        assert (record.value, record.n) == (pytest.approx(total / count, rel=1e-4), count)
        assert record.interval is not None
        assert record.interval[0] < record.value < record.interval[1]
    assert share.value == np.sum(parts["ar_hit"], axis=0)[1] / share.n


def test_no_hits_are_an_error(batches: TextBatches) -> None:
    with pytest.raises(
        ValueError, match=r"is a 'hit' token where bigrams that occur more than 1 times in the text are no hits: "
    ):
        records_of("repeats", any_model("diff", **SIZES), batches, frequent=1, length=2)


@pytest.mark.parametrize("chunk", [1, 3, 1 << 24])
def test_frequent_bigrams(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted within documents, never across the end of one, in parts of any size."""
    monkeypatch.setattr(document_losses, "_BIGRAMS", chunk)
    documents = [np.array(list(text.encode()), dtype=np.uint16) for text in ("abab", "ba", "abc", "b", "ab")]
    pair = {name: int(bigrams(np.array([ord(c) for c in name]))[0]) for name in ("ab", "ba", "bc")}
    assert frequent_bigrams(documents, 3).tolist() == [pair["ab"]]
    assert sorted(frequent_bigrams(documents, 1)) == sorted([pair["ab"], pair["ba"]])
    assert len(frequent_bigrams(documents, 4)) == 0


@pytest.mark.parametrize("kind", ["softmax", "diffllama"])
def test_positions_by_definition(kind: str, batches: TextBatches) -> None:
    model, length = any_model(kind, **SIZES), 48
    long = [document for document in batches.documents() if len(document) >= length]
    losses = []  # of each document, (windows, length − 1)
    for document in long:
        starts = range(0, min(2 * length, len(document) // length * length), length)
        losses.append(np.array([row_losses(model, document[start : start + length]) for start in starts]))
    records = records_of("positions", model, batches, first=8, windows=2)
    places = [(8, 1, "1–7"), (16, 8, "8–15"), (32, 16, "16–31"), (48, 32, "32–47")]
    for (mark, first, label), cumulative, between in zip(places, records[::2], records[1::2], strict=True):
        assert (cumulative.name, cumulative.coordinates.label) == (CUMULATIVE_LOSS, f"first {mark} tokens")
        assert (between.name, between.coordinates.label) == ("positions/loss", f"position {label}")
        for record, begin in ((cumulative, 0), (between, first - 1)):
            parts = [(each[:, begin : mark - 1].sum(), each[:, begin : mark - 1].size) for each in losses]
            assert np.array(record.documents) == of_documents(parts)
            assert record.value == pytest.approx(np.sum(parts, axis=0)[0] / (record.n or 0), rel=1e-4)
            assert record.interval is not None
    for options, message in (
        ({"first": 49}, r"first must lie in 2 … length = 48, got 49\.$"),
        ({"length": 4000}, "two documents of 4000 tokens or more"),
    ):
        with pytest.raises(ValueError, match=message):
            records_of("positions", model, batches, **options)
