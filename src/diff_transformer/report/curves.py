"""What a run's metrics.jsonl holds, as lines to draw."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diff_transformer.report import figures, markup
from diff_transformer.report.figures import Series
from diff_transformer.results import read_json

Metrics = Sequence[Mapping[str, Any]]


def series(metrics: Metrics, key: str, label: str, colour: str | None = None, marker: str = "o") -> Series | None:
    """The values of `key` over steps, where they were logged; None if they never were."""
    points = [(line["step"], line[key]) for line in metrics if isinstance(line.get(key), int | float)]
    if not points:
        return None
    steps, values = zip(*points, strict=True)
    return Series(label, steps, values, colour=colour, marker=marker)


def validation_keys(runs: Sequence[Metrics]) -> list[str]:
    """The names of what was measured by evaluations during training, as logged."""
    return list(
        dict.fromkeys(key for metrics in runs for line in metrics for key in line if key.startswith("validation/"))
    )


def in_words(lines: Sequence[Series]) -> str:
    """The ends of curves, for those who do not see them."""
    return "; ".join(f"{line.label} goes from {line.y[0]:.3g} to {line.y[-1]:.3g}" for line in lines)


def lambda_figure(metrics: Metrics, initial: Sequence[float] | None, title: str) -> list[str]:
    """λ by layer over training as one figure; none for a run that logged none (any but a DIFF's).

    Lines with a λ that was not finite (null) are left out.
    """
    logged = [
        (line["step"], line["lambdas"]) for line in metrics if line.get("lambdas") and None not in line["lambdas"]
    ]
    if not logged:
        return []
    steps, values = zip(*logged, strict=True)
    layers = list(zip(*values, strict=True))
    if initial is not None and len(initial) != len(layers):
        initial = None
    ends = "; ".join(f"layer {number} ends at {values[-1]:.2f}" for number, values in enumerate(layers, start=1))
    caption = "One line per layer; triangles at the left edge mark λ_init." if initial else "One line per layer."
    return [
        markup.figure(
            figures.lambdas(steps, layers, initial, title=title), f"{title} by layer over training: {ends}.", caption
        )
    ]


def initial_lambdas(run_dir: Path) -> list[float] | None:
    """λ_init of each layer as the saved model's config says; None if there is no such file.

    The paper's schedule (Section 2.1) is λ_init(l) = 0.8 − 0.6 · exp(−0.3 · (l − 1)) with l counted from 1.
    """
    path = run_dir / "model" / "config.json"
    if not path.is_file():
        return None
    config = read_json(path)
    layers, initial = config.get("num_hidden_layers"), config.get("lambda_init")
    if not isinstance(layers, int):
        return None
    if initial == "schedule":
        return [0.8 - 0.6 * math.exp(-0.3 * layer) for layer in range(layers)]
    return [float(initial)] * layers if isinstance(initial, int | float) else None
