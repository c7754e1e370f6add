"""Learning rate and weight decay."""

import pytest
from torch import nn

from diff_transformer.train.optimizer import build_optimizer, learning_rate
from diff_transformer.train.schema import TrainRecipe


def recipe(**settings: object) -> TrainRecipe:
    return TrainRecipe.model_validate({"steps": 100, "learning_rate": 1.0, "warmup_steps": 10} | settings)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_warm_up_and_the_ends(schedule: str) -> None:
    settings = recipe(schedule=schedule)
    assert [learning_rate(step, settings) for step in (1, 5, 10)] == pytest.approx([0.1, 0.5, 1.0])
    assert learning_rate(100, settings) == pytest.approx(1.0 if schedule == "constant" else 0.1)
    assert learning_rate(55, settings) == pytest.approx(1.0 if schedule == "constant" else 0.55)
    later = [learning_rate(step, settings) for step in range(10, 101)]
    assert later == sorted(later, reverse=True)


def test_without_warm_up_or_with_nothing_else() -> None:
    assert learning_rate(1, recipe(warmup_steps=0, steps=1, final_learning_rate=0.5)) == pytest.approx(0.5)
    assert learning_rate(100, recipe(warmup_steps=100)) == pytest.approx(1.0)
    assert learning_rate(50, recipe(warmup_steps=200)) == pytest.approx(0.25)


def test_only_matrices_decay() -> None:
    model = nn.ModuleDict({"linear": nn.Linear(3, 4), "norm": nn.LayerNorm(4), "embedding": nn.Embedding(5, 3)})
    decayed, others = build_optimizer(model, recipe(weight_decay=0.2, betas=[0.8, 0.9])).param_groups
    assert decayed["weight_decay"] == 0.2
    assert others["weight_decay"] == 0
    assert [tuple(p.shape) for p in decayed["params"]] == [(4, 3), (5, 3)]
    assert [tuple(p.shape) for p in others["params"]] == [(4,), (4,), (4,)]
    assert decayed["betas"] == (0.8, 0.9)
