"""Defines the experiment on throughput: tokens per second in training and in a forward pass (Table 7)."""

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from diff_lab.bench.benchmark import FORWARD, STEP, BenchRow, refuse_wrong
from diff_lab.bench.model_bench import DIFF, ModelSettings, measure_model
from diff_lab.coordinates import Coordinates
from diff_lab.experiments.experiment import ComparisonRule, Experiment, Preset, compared_by
from diff_lab.experiments.paper_preset import PaperPreset
from diff_lab.measure.measurement import Count, Counts, Options, Text
from diff_lab.record import Result
from diff_lab.train import Progress

NAMES = {STEP: "throughput/training", FORWARD: "throughput/forward"}
# Tokens per second of the paper's 3B models, DIFF and then the Transformer, by length.
PAPER = {
    "throughput/training": {
        Coordinates(length=2048): (6635.0, 7247.0),
        Coordinates(length=4096): (6718.0, 7491.0),
    },
    "throughput/forward": {
        Coordinates(length=2048): (46811.0, 51228.0),
        Coordinates(length=4096): (44521.0, 48762.0),
    },
}
# Of its 13B models with 2048 tokens, which the benchmark does not build.
PAPER_13B = {"throughput/training": (942, 998), "throughput/forward": (13653, 14346)}
PAPER_VARIANT = "the paper's diff"


class ThroughputOptions(Options):
    """What is timed, where; what is not given is the device's own, see `ModelSettings`."""

    device: Text = Field(default="cpu", description="a torch device")
    dtypes: tuple[str] = Field(default=("float32",), description="a dtype, in a list")
    lengths: Counts = Field(default=(2048,), description="tokens of a sequence")
    layers: Count | None = Field(default=None, description="decoder layers")
    rounds: Count | None = Field(default=None, description="alternated runs")
    check_layers: Count | None = Field(default=None, description="layers of the models whose results are checked")
    check_vocabulary: Count | None = Field(default=None, description="vocabulary of those models")


class _StageMessages:
    """Tells the stages of the benchmark as messages; rows are shown when all repetitions are there."""

    def __init__(self, progress: Progress, repetition: str) -> None:
        self._progress, self._repetition = progress, repetition

    def stage(self, text: str, done: int, total: int) -> None:
        self._progress.tell(f"{self._repetition}, part {done + 1} of {total}: {text}")

    def row(self, row: BenchRow) -> None: ...


def _measure(preset: Preset, progress: Progress) -> list[Result]:
    """Each seed is a repetition: models built anew, checked, and timed in alternated runs."""
    settings = ModelSettings.on(passes=("forward", "step"), candidates=(DIFF,), **preset.options)
    records = []
    for seed in range(preset.seeds):
        _, rows = measure_model(settings, _StageMessages(progress, f"repetition {seed + 1} of {preset.seeds}"))
        refuse_wrong(rows)
        records += throughput_records(rows, seed)
    return records


def throughput_records(rows: Sequence[BenchRow], seed: int) -> list[Result]:
    """A repetition's rows as records: tokens per second, and DIFF's as a share of the Transformer's, round by round.
    Raises ValueError where something could not be timed."""
    records = []
    for row in rows:
        if row.tokens_per_second is None or row.ratio is None:
            raise ValueError(f"{row.candidate} could not be timed ({row.pass_}, {row.sizes}): {row.reason}.")
        name, length, variant = NAMES[row.pass_], Coordinates(length=row.shape["length"]), row.candidate
        shared: dict[str, Any] = {"coordinates": length, "seed": seed, "better": "higher"}
        speed = row.tokens_per_second
        records.append(Result(name=name, variant=variant, value=speed, n=row.rounds, unit="tokens/s", **shared))
        if row.candidate == DIFF:
            shared["name"] = f"{name}_share"
            records.append(Result(variant=variant, value=1 / row.ratio, n=row.rounds, **shared))
            if length in PAPER[name]:
                diff, transformer = PAPER[name][length]
                records.append(Result(variant=PAPER_VARIANT, value=diff / transformer, **shared))
    return records


TABLE_7 = Experiment(
    name="table7",
    shows="tokens per second of both models, training and forward, in alternated runs (Table 7)",
    presets={
        "cpu": Preset(
            variants=(),
            options={
                "device": "cpu",
                "dtypes": ("float32",),
                "lengths": (2048,),
                "layers": 4,
                "rounds": 5,
                "check_layers": 1,
                "check_vocabulary": 512,
            },
            seeds=3,
            minutes=2.5,
        ),
        "gpu": Preset(variants=(), options={"device": "cuda", "lengths": (2048, 4096)}, seeds=3, minutes=12),
        "paper": PaperPreset(
            variants=(),
            commands=(
                "diff-lab bench model --device cuda --length 2048 --length 4096 --pass forward --pass step "
                "--candidate diff --output runs/table7",
            ),
            remarks=(
                "It has the sizes of the 3B models, and as many of their 28 layers as the GPU holds of both models. "
                "The paper's 13B models are not measured; theirs, of DIFF and of the Transformer, in tokens per "
                "second: "
                + "; ".join(f"{name.split('/')[1]} {one:,} and {other:,}" for name, (one, other) in PAPER_13B.items())
                + ".",
            ),
        ),
    },
    # Our question: whether DIFF costs a smaller share of throughput than in the paper, which claims no such thing.
    compare=compared_by(
        *(
            rule
            for name, values in PAPER.items()
            for rule in (
                ComparisonRule(name=f"{name}_share", against=PAPER_VARIANT, exploratory=True, quality=False),
                ComparisonRule(name=name, at=values.__contains__, paper=values.get, claimed=False, quality=False),
            )
        )
    ),
    options=ThroughputOptions,
    measure_once=_measure,
    rehearsal={
        "dtypes": ("bfloat16",),
        "batch": 1,
        "layers": 1,
        "rounds": 5,
        "hidden_size": 64,
        "intermediate_size": 64,
        "head_dim": 32,
        "vocabulary": 256,
        "check_layers": 1,
        "check_vocabulary": 256,
    },
    notes=(
        "A share is DIFF's tokens per second over the Transformer's, the median of alternated rounds; a seed is a "
        "repetition with models built anew. Whether it is larger than the paper's, of models of 3B parameters, is an "
        "open question; tokens per second depend on the machine and the model's size, and are not comparable.",
    ),
)
