"""A demo folder with made-up numbers, as `diff-lab demo` would leave it."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diff_lab.coordinates import Coordinates
from diff_lab.record import AttentionExample, Result, ResultsFile, Samples
from diff_lab.report import plots
from diff_lab.results_files import write_json

DEPTHS = tuple(Coordinates(depth=(fifth / 5, (fifth + 1) / 5)) for fifth in range(5))
LAYERS = 4


def _metrics(task: str, variant: str, steps: int, noise: random.Random) -> str:
    lines = []
    floor, start = {"retrieval": (2.0 if variant == "diff" else 3.1, 5.0), "language": (1.5, 5.4)}[task]
    for step in range(1, steps + 1):
        progress = 1 - math.exp(-4 * step / steps)
        lambdas = [0.8 - 0.6 * math.exp(-0.3 * layer) + 0.15 * progress * (layer - 1) for layer in range(LAYERS)]
        line = {
            "step": step,
            "loss": start + (floor - start) * progress + noise.gauss(0, 0.12),
            "learning_rate": 2e-3 * min(1, step / 50),
            "grad_norm": abs(noise.gauss(1, 0.2)),
            "tokens_per_second": noise.gauss(20000, 500),
            "lambdas": lambdas if variant == "diff" else None,
        }
        if step % (steps // 6) == 0:
            line["validation/loss"] = start + (floor - start) * progress
            line["validation/accuracy"] = (0.55 if variant == "diff" else 0.25) * progress
        lines.append(json.dumps(line) + "\n")
    return "".join(lines)


def _records(noise: random.Random) -> list[Result]:
    records: list[Result] = []

    def measure(name: str, variant: str, value: float, half: float | None = None, **more: Any) -> None:
        interval = None if half is None else (value - half, value + half)
        records.append(Result(name=name, variant=variant, value=value, interval=interval, seed=0, **more))

    # For DIFF and for the Transformer, with the better direction.
    of_attention: dict[str, tuple[float, float, Any]] = {
        "accuracy_by_depth": (0.5, 0.24, "higher"),
        "attention_to_answer_signed": (0.21, 0.05, "higher"),
        "attention_to_answer_share": (0.3, 0.05, "higher"),
        "attention_noise_signed": (0.2, 0.6, "lower"),
        "attention_noise_share": (0.58, 0.6, "lower"),
    }
    for side, variant in enumerate(("diff", "softmax")):
        value = (0.547, 0.254)[side]
        measure("retrieval/accuracy", variant, value, 0.022, n=2000, better="higher", method="Wilson")
        for depth in DEPTHS:
            for name, (*shares, better) in of_attention.items():
                more = {"coordinates": depth, "n": 500, "better": better, "method": "t over sequences"}
                measure(f"retrieval/{name}", variant, shares[side] + noise.gauss(0, 0.01), 0.015, **more)
        measure("language/bits_per_byte", variant, (2.314, 2.322)[side], 0.02, n=80, method="bootstrap by document")
        measure("language/validation_loss", variant, 1.604, unit="nats", better="lower")
        for task in ("retrieval", "language"):
            measure(f"{task}/seconds", variant, (143.2, 121.9)[side], unit="s", better="lower")
            measure(f"{task}/parameters", variant, (812_825.0, 812_345.0)[side])
    order = {"retrieval": 0, "language": 1}
    return sorted(records, key=lambda record: order[record.name.partition("/")[0]])


def _attention(noise: random.Random) -> AttentionExample:
    size, query, answer = 96, 90, 31
    needles = (10, 11, 30, 31, 52, 53, 70, 71)

    def rows(focus: float) -> list[list[float]]:
        out = []
        for row in range(size):
            weights = [math.exp(noise.gauss(0, 1)) for _ in range(row + 1)]
            if row == query:
                weights[answer] += focus * sum(weights)
            out.append([weight / sum(weights) for weight in weights] + [0.0] * (size - row - 1))
        return out

    first, second = rows(1.0), rows(0.05)
    difference = [[a - 0.7 * b for a, b in zip(*pair, strict=True)] for pair in zip(first, second, strict=True)]
    keys = (*needles[::2], query - 3, query)
    tokens = [f"k{at}" if at in keys else f"v{at}" if at in needles else "·" for at in range(size)]
    maps = {"diff": {"A1": first, "A2": second, "difference": difference}, "softmax": {"A": rows(0.2)}}
    return AttentionExample(
        tokens=tuple(tokens),
        layers={"diff": 3, "softmax": 4},
        heads={"diff": 2, "softmax": 5},
        query_position=query,
        answer_positions=(answer,),
        needle_positions=needles,
        maps=maps,
        lambda_=0.7,
        answered={"diff": True, "softmax": False},
    )


@pytest.fixture(scope="session")
def make_demo() -> Callable[[Path], Path]:
    """Write a whole demo into a folder."""

    def make(folder: Path) -> Path:
        noise = random.Random(0)
        folder.mkdir(parents=True, exist_ok=True)
        results = ResultsFile(
            title="A Differential Transformer beside a Transformer",
            command="diff-lab demo --seed 0",
            device="AMD EPYC 7763 64-Core Processor, 2 threads",
            versions={"python": "3.11.7", "diff-transformer": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0"},
            commit="0123456789abcdef0123456789abcdef01234567",
            created="2026-01-01T12:00:00+00:00",
            settings={"retrieval": {"steps": 600, "layers": LAYERS}, "text": None},
            records=tuple(_records(noise)),
        )
        write_json(folder / "results.json", results)
        for task, steps in (("retrieval", 600), ("language", 480)):
            for variant in ("diff", "softmax"):
                model = folder / f"{task}-{variant}" / "model"
                model.mkdir(parents=True)
                (model.parent / "metrics.jsonl").write_text(_metrics(task, variant, steps, noise))
                (model.parent / "recipe.yaml").write_text(f"name: {task}-{variant}\n")
                initial = "schedule" if variant == "diff" else None
                write_json(model / "config.json", {"num_hidden_layers": LAYERS, "lambda_init": initial})
        write_json(folder / "attention.json", _attention(noise), indent=None)
        python = "import os\n\n\ndef read(path):\n    with open(path) as file:\n        return file."
        samples = Samples(
            prompt="def read(path):", diff=python[16:] + "read()\n", softmax="\n    return self.self\n" * 4
        )
        write_json(folder / "samples.json", samples)
        return folder

    return make


@pytest.fixture
def no_drawings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the drawings out, where only what stands around them is looked at."""
    monkeypatch.setattr(plots, "svg", lambda _: '<svg viewBox="0 0 72 72"></svg>')


@pytest.fixture
def demo_dir(tmp_path: Path, make_demo: Callable[[Path], Path]) -> Path:
    return make_demo(tmp_path / "demo")
