"""Accuracy and Table 3's measures on models and maps whose answers are known."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM

import diff_lab.measure.retrieval as room
from diff_lab.data import ManyShotBatches, RetrievalBatches
from diff_lab.experiments.definitions import find_experiment
from diff_lab.measure.accuracy import ratio_samples
from diff_lab.measure.measurement import EvalInput, MeasurementRequest
from diff_lab.measure.retrieval import (
    RetrievalLengths,
    applied_maps,
    attention_mass,
    retrieval_answers,
    retrieval_records,
)
from diff_lab.measure.standard import validation_callback
from diff_lab.record import Result
from diff_lab.statistics import bootstrap_interval, mean_interval
from diff_transformer.convert import convert_from
from diff_transformer.model import DiffTransformerConfig, DiffTransformerForCausalLM

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


def test_attention_mass_by_both_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each query puts 0.5 on its answer, −0.25 on one noise token and 0.25 on itself, in one head of two; the other
    head looks at the asked needle's key alone, which is neither answer nor noise."""
    sample = TASK.sample(5, 0)
    n, queries = sample.answer_spans.shape
    maps = torch.zeros(n, 2, TASK.length, TASK.length)
    for row in range(n):
        noise = next(p for p in range(TASK.context_length) if int(sample.input_ids[row, p]) >= TASK.first_noise)
        for q in range(queries):
            query, answer = int(sample.query_positions[row, q]), int(sample.answer_spans[row, q])
            maps[row, 0, query, answer], maps[row, 0, query, noise], maps[row, 0, query, query] = 0.5, -0.25, 0.25
            maps[row, 1, query, answer - 1] = 1.0
    layers = iter([maps[:3], maps[3:]])

    def fake(model: Any, input_ids: Tensor) -> list[Tensor]:
        return [next(layers)]

    monkeypatch.setattr(room, "applied_maps", fake)
    mass = attention_mass(Oracle(), sample, TASK.context_length, batch_size=3)
    expected = {"answer_signed": 0.5, "answer_share": 0.5, "noise_signed": -0.25, "noise_share": 0.25}
    for name, value in expected.items():
        torch.testing.assert_close(getattr(mass, name), torch.full((n, queries), value / 2), msg=name)


def test_records_of_a_real_model() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = DiffTransformerForCausalLM(DiffTransformerConfig(vocab_size=TASK.vocab_size, **sizes)).eval()
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
    first_queries = TASK.asking(TASK.num_pairs, 1)
    for is_wrong in (True, False):
        oracle = Oracle(torch.full((1, first_queries.length), is_wrong))
        assert validation_callback(TASK)(oracle, 1) == {"validation/accuracy": 0.0 if is_wrong else 1.0}


BATCHES = RetrievalBatches(num_pairs=2, length=24, num_keys=2, num_values=2, num_noise=4)


@pytest.fixture(scope="module")
def longer() -> DiffTransformerForCausalLM:
    torch.manual_seed(2)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = DiffTransformerConfig(
        vocab_size=BATCHES.vocab_size, max_position_embeddings=256, initializer_range=0.5, **sizes
    )
    return DiffTransformerForCausalLM(config).eval()


def measured(longer: DiffTransformerForCausalLM, seed: int = 0, **options: Any) -> list[Result]:
    request = MeasurementRequest(name="retrieval_lengths", options=options)
    return request.run(EvalInput(model=longer, variant="it", batches=BATCHES, seed=seed))


def test_each_context_is_so_many_times_as_long(longer: DiffTransformerForCausalLM) -> None:
    records = measured(longer, factors=[1, 3], sequences=200, seed=5)
    assert [(record.name, record.coordinates.label, record.n, record.seed) for record in records] == [
        ("length/accuracy", "context × 1", 200, 5),
        ("length/accuracy", "context × 3", 200, 5),
    ]
    for record, factor in zip(records, (1, 3), strict=True):
        # The context of 18 tokens that stands before two queries in training, and one query of three tokens.
        task = RetrievalBatches(
            num_pairs=2, length=18 * factor + 3, num_queries=1, num_keys=2, num_values=2, num_noise=4
        )
        assert record.value == retrieval_answers(longer, task.sample(200, 5)).double().mean().item()
        assert record.interval is not None
        assert 0 < record.value < 1
    assert records[0].value != records[1].value


def test_the_measure_of_lengths_is_the_experiments() -> None:
    experiment = find_experiment("length_generalisation")
    (request,) = experiment.requests(experiment.presets["cpu"])
    assert request.resolve() == RetrievalLengths()


def test_what_lengths_refuse(longer: DiffTransformerForCausalLM) -> None:
    other = ManyShotBatches(4, classes=2, labels=2, words=4)
    of_other = EvalInput(model=longer, variant="it", batches=other)
    with pytest.raises(
        ValueError, match=r"^retrieval_lengths is measured on the retrieval task alone, which the model"
    ):
        RetrievalLengths().run(of_other)
    for options, name in (({"factors": [2, 0]}, "factors"), ({"sequences": 0}, "sequences")):
        with pytest.raises(ValueError, match=rf"cannot take .* for {name} .*greater than or equal to 1\.$"):
            measured(longer, **options)


MAP_SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


@pytest.mark.parametrize("kind", ["llama", "diffllama"])
def test_maps_of_models_of_transformers(kind: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs: Any = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**MAP_SIZES)),
        "diffllama": lambda: DiffLlamaForCausalLM(DiffLlamaConfig(**MAP_SIZES)),
    }[kind]().eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(20)  # maps that are far from even
            if "lambda" in name:
                parameter.normal_(std=0.4)
    theirs.save_pretrained(tmp_path / "theirs")
    convert_from(kind, tmp_path / "theirs", tmp_path / "ours")
    ours = DiffTransformerForCausalLM.from_pretrained(tmp_path / "ours").eval()
    tokens = torch.randint(40, (3, 13))
    implementation = theirs.config._attn_implementation
    maps, expected = applied_maps(theirs, tokens), applied_maps(ours, tokens)
    assert theirs.config._attn_implementation == implementation
    assert len(maps) == len(expected) == 2
    for one, other in zip(maps, expected, strict=True):
        assert one.shape == other.shape == (3, 2 if kind == "diffllama" else 4, 13, 13)
        # Heads may stand in another order.
        torch.testing.assert_close(one.mean(1), other.mean(1))
        torch.testing.assert_close(one.square().mean(1), other.square().mean(1))
    assert (maps[0].amin() < -1e-3) == (kind == "diffllama")


def test_a_model_without_maps_is_refused() -> None:
    class Mute:
        config = SimpleNamespace(_attn_implementation="eager", model_type="mute")

        def __call__(self, **_: Any) -> Any:
            return SimpleNamespace(attentions=None)

    with pytest.raises(ValueError, match="Mute returns no attentions"):
        applied_maps(Mute(), torch.zeros(1, 3, dtype=torch.long))
