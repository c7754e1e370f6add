"""Accuracy and Table 3's measures on models and maps whose answers are known."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from any_model import any_model
from diff_lab.data import RetrievalBatches
from diff_lab.measure.answers import ratio_samples
from diff_lab.measure.measurement import EvalInput
from diff_lab.measure.retrieval import ATTENTION, attention_mass, retrieval_answers, retrieval_records
from diff_lab.measure.standard import validation_callback
from diff_lab.statistics import bootstrap_interval, mean_interval
from diff_transformer.model import attention_maps

TASK = RetrievalBatches(num_pairs=3, length=40, num_keys=8, num_values=8, num_noise=8)


class Oracle(torch.nn.Module):
    """Predicts the token after next to every position: where a key is asked for, its answer stands there."""

    def __init__(self, wrong: Tensor | None = None) -> None:
        super().__init__()
        self.anchor = torch.nn.Parameter(torch.zeros(1))
        self.wrong = wrong

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        following = input_ids.roll(-1, dims=1)
        if self.wrong is not None:
            following = torch.where(self.wrong, 0, following)
        return SimpleNamespace(logits=torch.nn.functional.one_hot(following, TASK.vocab_size).float())


def test_a_model_that_knows_all_answers() -> None:
    assert retrieval_answers(Oracle(), TASK.sample(10, 0), batch_size=4).all()


def test_each_query_is_judged_at_its_own_place() -> None:
    sample = TASK.sample(6, 0)
    wrong = torch.zeros_like(sample.input_ids, dtype=torch.bool)
    wrong[2, sample.query_positions[2, 1]] = True
    right = retrieval_answers(Oracle(wrong), sample, batch_size=6)
    assert (~right).nonzero().tolist() == [[2, 1]]


def a_model() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    return any_model("diff", 2, vocab_size=TASK.vocab_size, initializer_range=0.5, **sizes)


@torch.no_grad()
def test_attention_mass_by_both_definitions() -> None:
    """Of every query by itself, on the maps that the model gives: noise is all of the context but the asked needle."""
    sample, model = TASK.sample(5, 0), a_model()
    mass = attention_mass(model, sample, TASK.context_length, batch_size=3)
    maps = torch.stack([layer.difference for layer in attention_maps(model, sample.input_ids)])
    for row, (queries, answers) in enumerate(zip(sample.query_positions, sample.answer_spans, strict=True)):
        for number, (query, answer) in enumerate(zip(queries.tolist(), answers.tolist(), strict=True)):
            weights = maps[:, row, :, query]
            noise = [place for place in range(TASK.context_length) if place not in (answer - 1, answer)]
            expected = [
                weights[..., answer].mean(),
                (weights[..., answer].abs() / weights.abs().sum(-1)).mean(),
                weights[..., noise].sum(-1).mean(),
                (weights[..., noise].abs().sum(-1) / weights.abs().sum(-1)).mean(),
            ]
            torch.testing.assert_close(mass[row, number], torch.stack(expected))
    assert list(ATTENTION.values()) == ["higher", "higher", "lower", "lower"]


def test_records_of_a_real_model() -> None:
    model = a_model()
    records = retrieval_records(EvalInput(model=model, variant="diff", seed=3), TASK, 20)
    by_name: dict[str, list[Any]] = {}
    for record in records:
        by_name.setdefault(record.name, []).append(record)
    assert by_name["retrieval/accuracy"][0].n == 60
    assert by_name["retrieval/first_query_accuracy"][0].n == 20
    depths = by_name["retrieval/accuracy_by_depth"]
    assert sum(record.n for record in depths) == 60
    assert [record.coordinates.label for record in depths] == sorted(record.coordinates.label for record in depths)
    mean = sum(record.value * record.n for record in depths) / 60
    assert mean == pytest.approx(by_name["retrieval/accuracy"][0].value, abs=1e-6)
    for record in records:
        assert record.interval is not None
        assert record.interval[0] - 1e-6 <= record.value <= record.interval[1] + 1e-6
        if "accuracy" in record.name:
            assert 0 <= record.interval[0] <= record.interval[1] <= 1
    assert by_name["retrieval/attention_noise_signed"][0].better == "lower"
    assert by_name["retrieval/attention_to_answer_share"][0].better == "higher"


def test_the_interval_of_a_depth_is_of_the_mean_over_its_queries() -> None:
    """As wide as resampling sequences makes it, where those with more queries at a depth answer otherwise."""
    random = torch.Generator().manual_seed(0)
    counts = torch.randint(1, 5, (400,), generator=random)
    sums = counts * 0.1 + torch.rand(400, generator=random) * counts**2 / 10
    samples = ratio_samples(sums, counts)
    assert samples.mean().item() == pytest.approx((sums.sum() / counts.sum()).item())
    low, high = mean_interval(samples.tolist()) or (0.0, 0.0)
    expected = bootstrap_interval(list(zip(sums.tolist(), counts.tolist(), strict=True)))
    assert (low, high) == pytest.approx(expected, abs=0.1 * (high - low))
    assert ratio_samples(counts.double(), counts).tolist() == [1.0] * 400


def test_all_wrong_still_has_an_interval_with_a_width() -> None:
    sample = TASK.sample(8, 0)
    model = Oracle(torch.ones(1, TASK.length, dtype=torch.bool))
    assert not retrieval_answers(model, sample).any()
    first_queries = TASK.asking(1)
    for is_wrong in (True, False):
        oracle = Oracle(torch.full((1, first_queries.length), is_wrong))
        assert validation_callback(TASK)(oracle, 1) == {"validation/accuracy": 0.0 if is_wrong else 1.0}
