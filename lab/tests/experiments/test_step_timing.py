"""How long trainings take is told before they begin, by steps that are timed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diff_lab.experiments import runner, step_timing
from diff_lab.experiments.request import request_experiment
from diff_lab.experiments.runner import run_experiment
from diff_lab.experiments.step_timing import seconds_of_step
from diff_lab.train import build_data, load_recipe
from small_experiment import SIZES, SMALL, TINY, Heard


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


def test_the_time_of_all_trainings_is_told_before_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = []

    def step(recipe: Any, *_: Any) -> float:
        timed.append(recipe.model.attention_type)
        return 90.0

    monkeypatch.setattr(runner, "seconds_of_step", step)
    experiment = replace(SMALL, presets={"cpu": replace(TINY, learning_rates=(), seeds=2)})
    heard = Heard()
    run_experiment(request_experiment(experiment), tmp_path, progress=heard, times_steps=True)
    assert timed == ["diff", "softmax"]
    assert "4 trainings; about 12 min left." in heard.messages
    # Of what an earlier command has trained it is known.
    request = request_experiment(experiment, seeds=3)
    run_experiment(request, tmp_path, overwrite=True, progress=heard, times_steps=True)
    assert len(timed) == 2
    assert "6 trainings, of which 4 are finished; less than a minute left." in heard.messages
    run_experiment(request_experiment(experiment), tmp_path / "untimed", progress=heard)
    assert len(timed) == 2
