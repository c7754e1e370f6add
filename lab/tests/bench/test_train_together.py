"""The program that trains runs at once computes what the training loop does."""

import json
import sys
from pathlib import Path

import pytest
import torch

from diff_lab.measure.standard import validation_callback
from diff_lab.train import build_data, parse_recipe, train

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 4, "initializer_range": 0.1}


@pytest.mark.parametrize("kind", ["diff", "softmax"])
def test_the_losses_are_the_loops(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import train_together

    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} and {number * number}, " for number in range(1500)), encoding="utf-8")
    recipe = parse_recipe(
        {
            "name": "together",
            "model": {"attention_type": kind, **SIZES},
            "data": {"kind": "text", "paths": [str(text)], "length": 32, "batch_size": 4, "isolate_documents": False},
            "train": {"steps": 6, "learning_rate": 0.01, "warmup_steps": 2, "log_every": 1, "evaluate_every": 3},
        }
    )
    data = build_data(recipe)
    run = train(recipe, tmp_path / "loop", data=data, on_evaluate=validation_callback(data.batches))
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]

    batches = torch.stack([data.batches.train_batch(number)["input_ids"] for number in range(1, 7)])
    together = [train_together.Run((kind, 0.01, 0), recipe, data, batches) for _ in range(2)]
    assert list(train_together.train(together, 6)) == [1, 2, 3, 4, 5, 6]
    sys.modules.pop("train_together")
    for one in together:
        assert [line["step"] for line in one.lines] == [line["step"] for line in lines]
        for found, expected in zip(one.lines, lines, strict=True):
            for name in found:
                same = found[name] == expected[name]  # the Transformer's λ are None
                assert same or found[name] == pytest.approx(expected[name], rel=2e-5), (name, expected["step"])
