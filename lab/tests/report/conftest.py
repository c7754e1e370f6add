"""A demo folder with made-up numbers, as `diff-lab demo` would leave it."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from diff_lab.coordinates import NOWHERE, Coordinates
from diff_lab.record import AttentionExample, Result, ResultsFile, Samples
from diff_lab.report import plots
from diff_lab.results_files import write_json
from diff_lab.statistics import proportion_interval

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
    records = []

    def proportion(
        name: str, variant: str, share: float, n: int, better: str | None, coordinates: Coordinates = NOWHERE
    ) -> None:
        interval = proportion_interval(round(share * n), n)
        record = {
            "name": name,
            "variant": variant,
            "value": round(share * n) / n,
            "interval": interval,
            "n": n,
            "coordinates": coordinates,
        }
        records.append(Result(**record, seed=0, better=better, method="Wilson"))

    for variant in ("diff", "softmax"):
        ours = variant == "diff"
        proportion("retrieval/accuracy", variant, 0.547 if ours else 0.254, 2000, "higher")
        for depth in DEPTHS:
            proportion(
                "retrieval/accuracy_by_depth",
                variant,
                (0.5 if ours else 0.24) + noise.gauss(0, 0.03),
                500,
                "higher",
                depth,
            )
            for name, share, better in (
                ("attention_to_answer_signed", 0.21 if ours else 0.05, "higher"),
                ("attention_to_answer_share", 0.3 if ours else 0.05, "higher"),
                ("attention_noise_signed", 0.2 if ours else 0.6, "lower"),
                ("attention_noise_share", 0.58 if ours else 0.6, "lower"),
            ):
                value = share + noise.gauss(0, 0.01)
                record = {
                    "name": f"retrieval/{name}",
                    "variant": variant,
                    "value": value,
                    "coordinates": depth,
                    "n": 500,
                    "seed": 0,
                }
                interval = (value - 0.015, value + 0.015)
                records.append(Result(**record, interval=interval, better=better, method="t over sequences"))
        for task in ("retrieval", "language"):
            count = 812_345 + (480 if ours else 0)
            seconds = 143.2 if ours else 121.9
            if task == "language":
                bits = 2.314 if ours else 2.322
                method = "bootstrap by document"
                interval = (bits - 0.02, bits + 0.02)
                common = {"variant": variant, "seed": 0, "better": "lower"}
                name = "language/bits_per_byte"
                records.append(Result(name=name, value=bits, interval=interval, n=80, method=method, **common))
                records.append(Result(name="language/validation_loss", value=1.604, unit="nats", **common))
            records.append(
                Result(name=f"{task}/seconds", variant=variant, value=seconds, unit="s", seed=0, better="lower")
            )
            records.append(Result(name=f"{task}/parameters", variant=variant, value=float(count), seed=0))
    return records


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
