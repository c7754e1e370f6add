"""Many-shot classification on a model that counts."""

from collections import Counter as Counts
from itertools import permutations, product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from diff_lab.coordinates import NO_COORDINATES, Coordinates
from diff_lab.data import ManyShotBatches, RetrievalBatches
from diff_lab.experiments.definitions import find_experiment
from diff_lab.measure.many_shot import (
    EpisodeOrders,
    Episodes,
    ceiling,
    drawn_orders,
    episode_answers,
    order_accuracies,
    order_results,
)
from diff_lab.measure.measurement import EvalInput, MeasurementRequest
from diff_lab.statistics import variance_beyond_chance

TASK = ManyShotBatches(classes=3, labels=3, words=6, item_length=1, noise=0.0)
SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}


class Counter(LlamaForCausalLM):
    """Answers a word with the label that followed it most often, or, where `forgets`, followed it first."""

    forgets = False

    def forward(self, input_ids: Tensor, use_cache: bool, **caches: DynamicCache) -> Any:
        assert use_cache
        (cache,) = caches.values()
        keys = torch.zeros(len(input_ids), 1, input_ids.shape[1], 1)
        keys[:, 0, :, 0] = input_ids
        seen, _ = cache.update(keys, keys, 0)
        rows = seen[:, 0, :, 0].long()
        logits = torch.zeros(*input_ids.shape, 9)
        for row, tokens in enumerate(rows.tolist()):
            labels = [label for word, label in zip(tokens[:-1:2], tokens[1::2], strict=False) if word == tokens[-1]]
            for label in labels[:1] if self.forgets else labels:
                logits[row, -1, label] += 1
        return type("Output", (), {"logits": logits})()


@pytest.fixture
def counter() -> Counter:
    return Counter(LlamaConfig(vocab_size=9, **SIZES)).eval()


def test_a_model_that_counts_is_right(counter: Counter) -> None:
    episode = TASK.episode(0, 0, shots=60, queries=30, noise=0.0)
    assert episode_answers(counter, episode).all()
    measurement = Episodes(shots=(1, 60), noises=(0.0, 0.3), episodes=6, queries=10)
    records = measurement.run(EvalInput(model=counter, variant="it", batches=TASK, seed=4))
    accuracies = {record.coordinates.label: record.value for record in records}
    assert accuracies["noise 0, 60 shots"] == 1
    assert accuracies["noise 0, 1 shot"] < 0.9
    assert accuracies["noise 0.3, 60 shots"] > 0.8
    assert all(record.n == 60 and record.better == "higher" for record in records)
    drawn = [TASK.episode(4, number, 1, 10, 0.0) for number in range(6)]
    assert records[0].value == torch.stack([episode_answers(counter, one) for one in drawn]).double().mean()


def test_orders_matter_to_one_that_forgets(counter: Counter) -> None:
    """Two equal wrong labels in three cannot outvote; but whoever goes by the first one depends on the order."""
    episode = TASK.episode(1, 0, shots=30, queries=8 * 400, noise=0.3)
    steady = order_accuracies(counter, episode, 8, "random", seed=1)
    counter.forgets = True
    forgetful = order_accuracies(counter, episode, 8, "random", seed=1)
    assert len(steady) == len(forgetful) == 8
    assert variance_beyond_chance([right / 400 for right in steady], 400) < 0.02**2
    assert variance_beyond_chance([right / 400 for right in forgetful], 400) > 0.06**2


def test_orders() -> None:
    classes = torch.tensor([0, 0, 1, 2, 1, 0, 2, 0])
    random = drawn_orders(classes, 20, "random", seed=0)
    alternating = drawn_orders(classes, 20, "alternating", seed=0)
    for orders in (random, alternating):
        assert len({tuple(order.tolist()) for order in orders}) == 20
        assert all(sorted(order.tolist()) == list(range(8)) for order in orders)
    for order in alternating:
        shown = classes[order].tolist()
        assert set(shown[:3]) == {0, 1, 2}
        assert shown[:3] == shown[3:6]
        assert shown[6:] == [0, 0]
    assert len({tuple(classes[order][:3].tolist()) for order in alternating}) > 2
    assert len(drawn_orders(torch.tensor([0, 1]), 20, "random", seed=0)) == 2


def test_what_orders_say() -> None:
    """Two sets with three orders of 10 questions; the second differs by less than chance."""
    measured = EvalInput(model=None, variant="it", seed=3)
    records = order_results(measured, [[2, 5, 8], [5, 5, 6]], 10, "task", Coordinates(part="here"))
    assert [record.name for record in records] == ["task_range", "task_variance", "task_spread", "task_mean"]
    chance = [(0.16 + 0.25 + 0.16) / 27, (0.25 + 0.25 + 0.24) / 27]
    variance = (0.09 - chance[0] + 0.01 / 3 - chance[1]) / 2
    assert chance[1] > 0.01 / 3, "of the second set it is below 0, and counts as that"
    assert [record.value for record in records] == pytest.approx([(0.6 + 0.1) / 2, variance, variance**0.5, 31 / 60])
    assert [record.better for record in records] == ["lower", "lower", "lower", "higher"]
    assert records[2].interval == (0, pytest.approx((records[1].interval or (0, 0))[1] ** 0.5))
    assert {(record.n, record.coordinates.label, record.seed, record.variant) for record in records} == {
        (2, "here", 3, "it")
    }


def test_less_than_chance_has_no_spread_and_a_range_is_of_ten_orders() -> None:
    measured = EvalInput(model=None, variant="it")
    records = order_results(measured, [[5] * 10 + [0], [5] * 10 + [0]], 10, "task", NO_COORDINATES)
    assert records[0].value == 0, "the eleventh order is no part of it"
    equal = order_results(measured, [[5, 5]], 10, "task", NO_COORDINATES)
    assert [record.value for record in equal] == pytest.approx([0, -0.25 / 9, 0, 0.5])


def test_orders_of_episodes(counter: Counter) -> None:
    measured = EvalInput(model=counter, variant="it", batches=TASK, seed=4)
    records = EpisodeOrders(shots=8, noises=(0.3,), orders=2, queries=4, sets=2).run(measured)
    expected = []
    for kind in ("random", "alternating"):
        sets = [TASK.episode(4, number, 8, 2 * 4, 0.3) for number in range(2)]
        counts = [order_accuracies(counter, episode, 2, kind, seed=4) for episode in sets]
        expected += order_results(measured, counts, 4, "many_shot/order", NO_COORDINATES)
    assert [record.value for record in records] == [record.value for record in expected]
    assert [(record.name, record.coordinates.label) for record in records] == [
        (f"many_shot/order_{name}", f"{kind} orders, noise 0.3")
        for kind in ("random", "alternating")
        for name in ("range", "variance", "spread", "mean")
    ]


@pytest.mark.parametrize(("name", "text"), [("episodes", "many_shot"), ("episode_orders", "many_shot_orders")])
def test_episodes_are_of_many_shot_data(name: str, text: str) -> None:
    other = EvalInput(model=None, variant="it", batches=RetrievalBatches())
    with pytest.raises(ValueError, match=rf"^{name} is measured on many_shot data alone, .* measure {text}\.$"):
        MeasurementRequest(name=name).run(other)


@pytest.mark.parametrize(("shots", "length"), [(0, 1), (1, 1), (4, 1), (0, 2), (1, 2), (2, 2)])
def test_the_ceiling_is_that_of_the_best_guess_after_each_evidence(shots: int, length: int) -> None:
    """Of four words in two classes: every dealing, every sequence and every question counted, for all are as likely."""
    answers: dict[Any, Counts[str]] = {}
    cases = 0
    for dealt in set(permutations("AABB")):
        words = {label: [word for word in range(4) if dealt[word] == label] for label in "AB"}
        items = [(item, label) for label in "AB" for item in product(words[label], repeat=length)]
        for *shown, (asked, label) in product(items, repeat=shots + 1):
            answers.setdefault((asked, *shown), Counts())[label] += 1
            cases += 1
    right = sum(max(labels.values()) for labels in answers.values())
    assert ceiling(shots, words=4, classes=2, item_length=length) == pytest.approx(right / cases)


def test_the_ceiling_is_told_where_it_is_known() -> None:
    preset = find_experiment("fig6").presets["cpu"]
    recipe = preset.variant_recipe(preset.variants[0])
    levels = Episodes(shots=(4, 16), noises=(0.0, 0.3)).baselines(recipe)
    assert [one.ceiling for one in levels] == [
        pytest.approx(0.8082, abs=1e-4),
        pytest.approx(0.9938, abs=1e-4),
        None,
        None,
    ]
    assert (ceiling(3, words=9, classes=4, item_length=1), ceiling(3, words=200, classes=50, item_length=2)) == (
        None,
        None,
    )
