"""A demo folder with made-up numbers, as `diff-lab demo` would leave it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diff_lab.coordinates import Coordinates
from diff_lab.learning import ACCURACY_CURVE
from diff_lab.record import Baseline, Result, ResultsFile
from diff_lab.results_files import write_json

# For DIFF and for the Transformer, with the better direction.
MEASURED: dict[str, tuple[float, float, Any]] = {
    "noise/accuracy": (0.547, 0.254, "higher"),
    "training/parameters": (812_825.0, 812_345.0, None),
}

VIEW = {"words": ["k3", "v5", "k3"], "answer": 1, "layer": 2, "head": 4}
VIEW |= {
    "learned": [[0.5, 0, 0], [0.2, 0.3, 0], [-0.1, 0.6, 0]],
    "without": [[1, 0, 0], [0.4, 0.6, 0], [0.7, 0.2, 0.1]],
}


def _metrics(variant: str, steps: int) -> str:
    lines = []
    for step in range(1, steps + 1):
        line = {
            "step": step,
            "loss": 5.0 - 3.0 * step / steps,
            "learning_rate": 2e-3,
            "grad_norm": 1.0,
            "tokens_per_second": 20_000.0,
            "lambdas": [0.2, 0.5 + 0.1 * step / steps] if variant == "diff" else None,
        }
        if step % (steps // 4) == 0:
            line["validation/loss"] = line["loss"]
            line["validation/accuracy"] = 0.5 * step / steps
        lines.append(json.dumps(line) + "\n")
    return "".join(lines)


def _records() -> list[Result]:
    records = []
    for name, (*values, better) in MEASURED.items():
        for variant, value in zip(("diff", "softmax"), values, strict=True):
            interval = (value - 0.022, value + 0.022) if better else None
            shared: dict[str, Any] = {"variant": variant, "better": better, "seed": 0}
            records.append(Result(name=name, value=value, interval=interval, **shared))
    for factor in (0.0, 0.5, 1.0, 2.0):
        value, at = 0.547 - abs(factor - 1) / 10, Coordinates(factor=factor)
        records.append(Result(name="noise/accuracy_by_lambda", variant="diff", value=value, coordinates=at, seed=0))
    return records


@pytest.fixture(scope="session")
def make_demo() -> Callable[[Path], Path]:
    """Write a whole demo into a folder."""

    def make(folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        results = ResultsFile(
            title="A Differential Transformer beside a Transformer",
            command="diff-lab demo --seed 0",
            device="AMD EPYC 7763 64-Core Processor, 2 threads",
            versions={"python": "3.11.7", "diff-transformer": "0.1.0", "torch": "2.13.0"},
            commit="0123456789abcdef0123456789abcdef01234567",
            created="2026-01-01T12:00:00+00:00",
            settings={"seed": 0, "view": VIEW},
            records=tuple(_records()),
            baselines=(Baseline(name=ACCURACY_CURVE, chance=0.06, floor=0.34, steps=600),),
        )
        write_json(folder / "results.json", results)
        for variant in ("diff", "softmax"):
            run = folder / variant
            run.mkdir()
            (run / "metrics.jsonl").write_text(_metrics(variant, 80))
            (run / "recipe.yaml").write_text(f"name: {variant}\n")
        (folder / "explorer.html").write_text("the explorer")
        return folder

    return make


@pytest.fixture
def demo_dir(tmp_path: Path, make_demo: Callable[[Path], Path]) -> Path:
    return make_demo(tmp_path / "demo")
