"""Recall in longer contexts, as a measure and as the experiment's measurement."""

import pytest
import torch

from diff_transformer.data import ManyShotBatches, RetrievalBatches
from diff_transformer.lab.experiments.registry import find_experiment
from diff_transformer.lab.measure.measurement import EvalInput, find_measurement
from diff_transformer.lab.measure.retrieval import retrieval_answers
from diff_transformer.lab.measure.retrieval_lengths import RETRIEVAL_LENGTHS, length_records
from diff_transformer.model import DiffTransformerConfig, DiffTransformerForCausalLM

BATCHES = RetrievalBatches(num_pairs=2, length=24, num_keys=2, num_values=2, num_noise=4)


@pytest.fixture(scope="module")
def model() -> DiffTransformerForCausalLM:
    torch.manual_seed(2)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = DiffTransformerConfig(
        vocab_size=BATCHES.vocab_size, max_position_embeddings=256, initializer_range=0.5, **sizes
    )
    return DiffTransformerForCausalLM(config).eval()


def test_each_context_is_so_many_times_as_long(model: DiffTransformerForCausalLM) -> None:
    records = length_records(model, BATCHES, "it", factors=[1, 3], sequences=200, seed=5)
    assert [(record.name, record.coordinates.label, record.n, record.seed) for record in records] == [
        ("length/accuracy", "context × 1", 200, 5),
        ("length/accuracy", "context × 3", 200, 5),
    ]
    for record, factor in zip(records, (1, 3), strict=True):
        # The context of 18 tokens that stands before two queries in training, and one query of three tokens.
        task = RetrievalBatches(
            num_pairs=2, length=18 * factor + 3, num_queries=1, num_keys=2, num_values=2, num_noise=4
        )
        assert record.value == retrieval_answers(model, task.sample(200, 5)).double().mean().item()
        assert record.interval is not None
        assert 0 < record.value < 1
    assert records[0].value != records[1].value


def test_the_measure_is_the_experiments(model: DiffTransformerForCausalLM) -> None:
    assert find_measurement("retrieval_lengths") is RETRIEVAL_LENGTHS
    of_preset = find_experiment("length_generalisation").presets["cpu"].options
    assert RETRIEVAL_LENGTHS.read({}) == RETRIEVAL_LENGTHS.read(of_preset)
    options = {"factors": [1, 2], "sequences": 20}
    found = RETRIEVAL_LENGTHS.run(
        EvalInput(model=model, variant="it", batches=BATCHES, seed=2), RETRIEVAL_LENGTHS.read(options)
    )
    assert found == length_records(model, BATCHES, "it", factors=[1, 2], sequences=20, seed=2)


def test_what_is_refused(model: DiffTransformerForCausalLM) -> None:
    other = ManyShotBatches(4, classes=2, labels=2, words=4)
    measured = EvalInput(model=model, variant="it", batches=other)
    with pytest.raises(
        ValueError, match=r"^retrieval_lengths is measured on the retrieval task alone, which the model"
    ):
        RETRIEVAL_LENGTHS.run(measured, RETRIEVAL_LENGTHS.read({}))
    with pytest.raises(ValueError, match=r"^factors must be 1 or more, got 0\.$"):
        length_records(model, BATCHES, "it", factors=[2, 0], sequences=4)
    with pytest.raises(ValueError, match=r"^sequences must be 1 or more, got 0\.$"):
        length_records(model, BATCHES, "it", factors=[2], sequences=0)
