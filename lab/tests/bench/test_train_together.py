"""The program that trains runs at once computes what the training loop does."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diff_lab.experiments.run_store import Store, load_trained
from diff_lab.measure.standard import validation_callback
from diff_lab.train import Data, Recipe, build_data, parse_recipe, train

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 4, "initializer_range": 0.1}


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("train_together")
    sys.modules.pop("train_together")


def small(kind: str, folder: Path, data_kind: str = "text") -> tuple[Recipe, Data, dict[str, Tensor]]:
    """A recipe, its data, and the batches of its steps."""
    text = folder / "text.txt"
    text.write_text("".join(f"{number} and {number * number}, " for number in range(1500)), encoding="utf-8")
    kinds = {
        "text": {"paths": [str(text)], "length": 32, "batch_size": 4, "isolate_documents": False},
        "many_shot": {"shots": 8, "batch_size": 8, "validation_sequences": 20},
    }
    recipe = parse_recipe(
        {
            "name": "together",
            "model": {"attention_type": kind, **SIZES},
            "data": {"kind": data_kind, **kinds[data_kind]},
            "train": {"steps": 6, "learning_rate": 0.01, "warmup_steps": 2, "log_every": 1, "evaluate_every": 3},
        }
    )
    data = build_data(recipe)
    steps = [data.batches.train_batch(number) for number in range(1, 7)]
    return recipe, data, {name: torch.stack([batch[name] for batch in steps]) for name in ("input_ids", "labels")}


@pytest.mark.parametrize(("kind", "data_kind"), [("diff", "text"), ("softmax", "text"), ("diff", "many_shot")])
def test_the_losses_are_the_loops(kind: str, data_kind: str, tmp_path: Path, program: Any) -> None:
    recipe, data, batches = small(kind, tmp_path, data_kind)
    run = train(recipe, tmp_path / "loop", data=data, on_evaluate=validation_callback(data.batches))
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    together = [program.Run(recipe, data, batches) for _ in range(2)]
    assert list(program.train(together, 6)) == [1, 2, 3, 4, 5, 6]
    for one in together:
        assert [line["step"] for line in one.lines] == [line["step"] for line in lines]
        for found, expected in zip(one.lines, lines, strict=True):
            for name in found:
                same = found[name] == expected[name]  # the Transformer's λ are None
                assert same or found[name] == pytest.approx(expected[name], rel=2e-5), (name, expected["step"])


def test_runs_are_found_by_the_store(tmp_path: Path, program: Any) -> None:
    """With the model, or with the step at which a loss was not finite and without one."""
    runs = [program.Run(*small("diff", tmp_path)) for _ in range(2)]
    with torch.no_grad():
        runs[1].model.model.norm.weight.fill_(torch.nan)
    list(program.train(runs, 6))
    for key, run in zip(("good", "bad"), runs, strict=True):
        run.write(tmp_path / "runs" / key, "commit", 1.0)
    good, bad = (Store(tmp_path / "runs").find(key) for key in ("good", "bad"))
    assert good is not None
    assert (good.diverged, len(good.metrics())) == (None, 6)
    assert load_trained(runs[0].recipe, good.model_folder).lambdas() == runs[0].model.lambdas()
    assert bad is not None
    assert bad.diverged == "The loss was nan and the gradient norm nan at step 1."
    assert bad.metrics()[0]["loss"] is None
    assert not bad.model_folder.is_dir()


def test_another_variant_is_refused(monkeypatch: Any, capsys: Any, program: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["program", str(tmp_path), '[["diff_v9", 0.01, 0]]', "--text", str(tmp_path)])
    (tmp_path / "text.txt").write_text("one and two", encoding="utf-8")
    with pytest.raises(SystemExit):
        program.main()
    assert "runs name a variant of diff, softmax" in capsys.readouterr().err
