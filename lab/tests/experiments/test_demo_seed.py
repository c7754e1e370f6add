"""The demo's seed is that of everything it trains."""

from pathlib import Path

import pytest

import diff_lab.experiments.demo as demo
from diff_lab.experiments.demo import run_demo
from diff_lab.train import load_recipe
from diff_transformer.utils.files import read_metrics
from tiny_demo import TINY


def test_the_seed_reaches_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shorter = {
        task: [*overrides, "train.steps=2", "train.log_every=1", "model.num_hidden_layers=1"]
        for task, overrides in TINY.items()
    }
    monkeypatch.setattr(demo, "FAST", shorter)
    monkeypatch.setattr(demo, "default_workers", lambda *_, **__: 1)
    text = tmp_path / "corpus.txt"
    text.write_text("".join(f"Line {line} is about {line**2}, not {line**3}.\n" for line in range(400)))
    losses = []
    for seed in (1, 2):
        folder = run_demo(tmp_path / str(seed), text=[text], seed=seed, fast=True)
        runs = [folder / f"{task}-{variant}" for task in demo.TASKS for variant in demo.VARIANTS]
        assert [load_recipe(run / "recipe.yaml").train.seed for run in runs] == [seed] * 4
        losses.append([read_metrics(run / "metrics.jsonl")[0]["loss"] for run in runs])
    assert all(first != second for first, second in zip(*losses, strict=True))
