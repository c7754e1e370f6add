"""How long trainings take is told before they begin, by steps that are timed."""

from typing import Any

import pytest
import torch

from diff_lab.experiments import step_timing
from diff_lab.experiments.step_timing import seconds_of_step
from diff_lab.train import build_data, load_recipe
from small_experiment import SIZES


def test_a_step_has_its_share_of_the_validations(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("retrieval", [*SIZES, "train.steps=40", "train.evaluate_every=10"])
    data = build_data(recipe)
    assert seconds_of_step(recipe, data) > 0
    assert seconds_of_step(load_recipe("retrieval", [*SIZES, "train.precision=bf16", "train.accumulation=2"]), data) > 0

    threads = []

    def seconds(work: Any, device: torch.device) -> float:
        work()
        threads.append(torch.get_num_threads())
        return 8.0 if torch.is_inference_mode_enabled() or not torch.is_grad_enabled() else 1.0

    monkeypatch.setattr(step_timing, "_seconds", seconds)
    before = torch.get_num_threads()
    assert seconds_of_step(recipe, data, before + 1) == 1.0 + 4 * 8.0 / 40
    assert set(threads) == {before + 1}
    assert torch.get_num_threads() == before
