"""Recall in longer contexts, as a measure and as the experiment's measurement."""

from typing import Any

import pytest
import torch

from diff_lab.data import ManyShotBatches, RetrievalBatches
from diff_lab.experiments.experiment import find_experiment
from diff_lab.measure.measurement import EvalInput, MeasurementRequest
from diff_lab.measure.retrieval import RetrievalLengths, retrieval_answers
from diff_lab.record import Result
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


def measured(model: DiffTransformerForCausalLM, seed: int = 0, **options: Any) -> list[Result]:
    request = MeasurementRequest(name="retrieval_lengths", options=options)
    return request.run(EvalInput(model=model, variant="it", batches=BATCHES, seed=seed))


def test_each_context_is_so_many_times_as_long(model: DiffTransformerForCausalLM) -> None:
    records = measured(model, factors=[1, 3], sequences=200, seed=5)
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


def test_the_measure_is_the_experiments() -> None:
    experiment = find_experiment("length_generalisation")
    (request,) = experiment.requests(experiment.presets["cpu"])
    assert request.resolve() == RetrievalLengths()


def test_what_is_refused(model: DiffTransformerForCausalLM) -> None:
    other = ManyShotBatches(4, classes=2, labels=2, words=4)
    of_other = EvalInput(model=model, variant="it", batches=other)
    with pytest.raises(
        ValueError, match=r"^retrieval_lengths is measured on the retrieval task alone, which the model"
    ):
        RetrievalLengths().run(of_other)
    for options, name in (({"factors": [2, 0]}, "factors"), ({"sequences": 0}, "sequences")):
        with pytest.raises(ValueError, match=rf"cannot take .* for {name} .*greater than or equal to 1\.$"):
            measured(model, **options)
