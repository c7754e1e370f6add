"""Computes gradients (Appendix G) and throughput (Table 7) as records, and compares gradients."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from pydantic import Field

from diff_lab.bench.benchmark import FORWARD, STEP, BenchRow, Recorder, refuse_wrong
from diff_lab.bench.model_bench import DIFF, ModelSettings, measure_model
from diff_lab.coordinates import Coordinates
from diff_lab.data import Batches
from diff_lab.experiments.experiment import Preset, by_name, compared_by, rules
from diff_lab.measure.gradients import gradient_callback
from diff_lab.measure.measurement import Count, Counts, Options, Text
from diff_lab.measure.standard import validation_callback
from diff_lab.record import Comparison, Result
from diff_lab.train import Progress

# Parameters that both variants have; no "output" where it is tied to the embedding.
KINDS = ("q", "k", "v", "o", "mlp", "norm", "embedding", "output")
# "Equivalent in magnitude" taken at its word: within a power of ten, each way.
LIMIT = 1.0
LIMIT_VARIANT = "a tenfold difference"


def on_evaluate(batches: Batches) -> Callable[[Any, int], dict[str, float]]:
    """Log the gradients beside the validation."""
    validation, gradients = validation_callback(batches), gradient_callback(batches)

    return lambda model, step: validation(model, step) | gradients(model, step)


def compare_gradients(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    """Compare the sizes, which the paper has within a power of ten, before and in training."""
    steps = list(dict.fromkeys(record.coordinates for record in records if record.name == "gradient/q"))
    distances = [record for kind in KINDS for record in distance_records(records, kind)]
    sizes = [f"gradient/{kind}" for kind in KINDS]
    asked: dict[str, Any] = {"exploratory": True, "quality": False}
    return compared_by(
        *rules([f"{size}_distance" for size in sizes], [("diff", LIMIT_VARIANT)], **asked),
        *rules(sizes, at=lambda step: step in (steps[0], steps[-1]), claimed=False, quality=False),
    )([*records, *distances], preset)


def distance_records(records: Sequence[Result], kind: str) -> list[Result]:
    """Return how far apart both variants' gradients are, |log10 of their ratio|: before training, and the mean of all
    steps that were looked at in it. The limit stands beside each as a variant of its own.
    """
    name = f"gradient/{kind}"
    sizes = {(one.seed, one.coordinates, one.variant): one.value for one in by_name(records, name)}
    distances: dict[tuple[int | None, Coordinates], list[float]] = {}
    for (seed, step, variant), value in sizes.items():
        other = sizes.get((seed, step, "softmax"))
        if variant == "diff" and other is not None:
            phase = Coordinates(phase="before training" if step == Coordinates(step=0) else "in training")
            decades = abs(math.log10(value / other)) if value > 0 and other > 0 else math.nan
            distances.setdefault((seed, phase), []).append(decades)
    shared: dict[str, Any] = {"name": f"{name}_distance", "unit": "powers of ten", "better": "lower"}
    return [
        Result(variant=variant, value=value, seed=seed, coordinates=phase, **shared)
        for (seed, phase), decades in distances.items()
        for variant, value in (("diff", fmean(decades)), (LIMIT_VARIANT, LIMIT))
    ]


THROUGHPUT_NAMES = {STEP: "throughput/training", FORWARD: "throughput/forward"}
# Tokens per second of the paper's DIFF over its Transformer's, of 3B parameters, by length.
PAPER_SHARES = {
    "throughput/training": {2048: 6635 / 7247, 4096: 6718 / 7491},
    "throughput/forward": {2048: 46811 / 51228, 4096: 44521 / 48762},
}
PAPER_VARIANT = "the paper's diff"


class ThroughputOptions(Options):
    """Settings of the timing; one that is not given is the device's own, see `ModelSettings`."""

    device: Text = Field(default="cpu", description="a torch device")
    dtypes: tuple[str] = Field(default=("float32",), description="a dtype, in a list")
    lengths: Counts = Field(default=(2048,), description="tokens of a sequence")
    layers: Count | None = Field(default=None, description="decoder layers")
    rounds: Count | None = Field(default=None, description="alternated runs")
    check_layers: Count | None = Field(default=None, description="layers of the models whose results are checked")
    check_vocabulary: Count | None = Field(default=None, description="vocabulary of those models")


def measure_throughput(preset: Preset, progress: Progress) -> list[Result]:
    """Measure a repetition for each seed: models built anew, checked, and timed in alternated runs."""
    settings = ModelSettings.on(passes=("forward", "step"), candidates=(DIFF,), **preset.options)
    records = []
    for seed in range(preset.seeds):
        progress.tell(f"repetition {seed + 1} of {preset.seeds}")
        recorder = Recorder(progress.tell, show=lambda row: None)
        measure_model(settings, recorder)
        refuse_wrong(recorder.rows)
        records += throughput_records(recorder.rows, seed)
    return records


def throughput_records(rows: Sequence[BenchRow], seed: int) -> list[Result]:
    """Return a repetition's rows as records: tokens per second, and DIFF's as a share of the Transformer's. Raises
    ValueError if something could not be timed."""
    records = []
    for row in rows:
        if row.tokens_per_second is None or row.ratio is None:
            raise ValueError(f"{row.candidate} could not be timed ({row.pass_}, {row.sizes}): {row.reason}.")
        name, length, variant = THROUGHPUT_NAMES[row.pass_], Coordinates(length=row.shape["length"]), row.candidate
        shared: dict[str, Any] = {"coordinates": length, "seed": seed, "better": "higher"}
        speed = row.tokens_per_second
        records.append(Result(name=name, variant=variant, value=speed, n=row.rounds, unit="tokens/s", **shared))
        if row.candidate == DIFF:
            shared["name"] = f"{name}_share"
            records.append(Result(variant=variant, value=1 / row.ratio, n=row.rounds, **shared))
            if (share := PAPER_SHARES[name].get(row.shape["length"])) is not None:
                records.append(Result(variant=PAPER_VARIANT, value=share, **shared))
    return records
