"""Loss and bits per byte against their definitions."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from any_model import any_model
from corpora import written
from diff_lab.data import ManyShotBatches, TextBatches, byte_tokenizer, prepare
from diff_lab.data.batches import IGNORED
from diff_lab.measure.measurement import EvalInput
from diff_lab.measure.standard import Standard, language_loss, validation_callback
from diff_transformer.model import DiffTransformerForCausalLM

TEXT = ["héllo world, this is one document. " * 9, "and this is another one, a little longer. " * 12]
TEXT += [f"document {number} is short" for number in range(12)]
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"initializer_range": 0.5}


@pytest.fixture
def batches(tmp_path: Path) -> TextBatches:
    cache = prepare(written(TEXT, tmp_path), byte_tokenizer())
    return TextBatches(cache, byte_tokenizer(), length=16, batch_size=3, validation_fraction=0.4)


@pytest.fixture
def model(batches: TextBatches) -> DiffTransformerForCausalLM:
    return any_model("diff", vocab_size=batches.vocab_size, **SIZES)


def test_loss_is_the_negative_log_likelihood_of_every_target(
    model: DiffTransformerForCausalLM, batches: TextBatches
) -> None:
    """Of each document by itself, whose first token is predicted by nothing."""
    nats, targets, documents, rows = 0.0, 0, 0, 0
    with torch.no_grad():
        for batch in batches.validation_batches():
            for row, positions in zip(batch["input_ids"], batch["position_ids"], strict=True):
                for document in row.tensor_split((positions == 0).nonzero().flatten()[1:]):
                    log_probabilities = model(document.unsqueeze(0)).logits[0].double().log_softmax(-1)
                    nats -= log_probabilities[:-1].gather(1, document[1:, None]).sum().item()
                    targets, documents = targets + len(document) - 1, documents + 1
                rows += 1
    assert documents > rows
    loss = language_loss(model, batches)
    assert loss.targets == targets
    assert loss.nats == pytest.approx(nats, rel=1e-5)
    assert loss.per_token == pytest.approx(nats / targets, rel=1e-5)
    assert loss.bits_per_byte == pytest.approx(nats / math.log(2) / batches.validation_bytes, rel=1e-5)
    assert math.isnan(replace(loss, bytes=0).bits_per_byte), "documents of one token each"


def test_records_and_callback_agree(model: DiffTransformerForCausalLM, batches: TextBatches) -> None:
    records = {
        record.name: record for record in Standard().run(EvalInput(model=model, variant="diff", batches=batches))
    }
    logged = validation_callback(batches)(model, 1)
    assert records["language/validation_loss"].value == logged["validation/loss"]
    assert records["language/bits_per_byte"].value == logged["validation/bits_per_byte"]
    assert all(record.better == "lower" and record.variant == "diff" for record in records.values())


def test_data_without_a_measurement_of_its_own_has_the_accuracy_of_its_labels() -> None:
    """As it is written: of every label the likeliest token before it, the masked ones left out."""
    batches = ManyShotBatches(4, classes=2, labels=2, words=4, validation_sequences=6)
    model = any_model("diff", vocab_size=batches.vocab_size, **SIZES)
    right = []
    for batch in batches.validation_batches():
        for tokens, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            likeliest = model(tokens[None]).logits[0].argmax(-1)
            right += [likeliest[n - 1] == label for n, label in enumerate(labels) if label != IGNORED and n]
    (record,) = Standard().run(EvalInput(model=model, variant="diff", batches=batches))
    assert (record.name, record.n, record.better) == ("validation/accuracy", len(right), "higher")
    assert 0 < record.value == sum(right) / len(right)
    assert validation_callback(batches)(model, 1) == {"validation/accuracy": record.value}


def test_a_vocabulary_beyond_the_models_is_refused(batches: TextBatches) -> None:
    model = any_model("diff", vocab_size=10, **SIZES)
    with pytest.raises(ValueError, match=r"vocabulary of 257 tokens, the model only 10\.$"):
        Standard().run(EvalInput(model=model, variant="diff", batches=batches))
