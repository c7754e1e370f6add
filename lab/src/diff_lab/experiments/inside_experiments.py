"""Defines the experiments on the inside of models: outliers, quantised logits, gradients, and throughput (Table 7)."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from pydantic import Field

from diff_lab.bench.benchmark import FORWARD, STEP, BenchRow, Recorder, refuse_wrong
from diff_lab.bench.model_bench import DIFF, ModelSettings, measure_model
from diff_lab.coordinates import Coordinates
from diff_lab.data import Batches
from diff_lab.experiments import language_experiments as language
from diff_lab.experiments.experiment import (
    ComparisonRule,
    Experiment,
    Preset,
    by_name,
    compared_by,
    rules,
    section,
)
from diff_lab.experiments.paper_preset import PaperPreset, evaluation
from diff_lab.measure.gradients import gradient_callback
from diff_lab.measure.measurement import Count, Counts, Options, Text
from diff_lab.measure.outliers import MEDIAN, TOKENS
from diff_lab.measure.standard import validation_callback
from diff_lab.record import Comparison, Headline, Result
from diff_lab.train import Progress

# Of the paper's 3B models over 0.4M tokens, DIFF and then the Transformer.
RANKS = (1, 2, 3, 10, 100, MEDIAN)
PAPER = {
    "outliers/attention_logits": ((38.8, 38.8, 37.3, 32.0, 27.4, 3.3), (318.0, 308.2, 304.9, 284.7, 251.5, 5.4)),
    "outliers/hidden_states": (
        (1688.2, 1672.5, 1672.1, 1624.3, 740.9, 1.2),
        (3608.6, 3607.4, 3603.6, 3552.1, 2448.2, 0.6),
    ),
}

TABLE_5 = Experiment(
    name="table5",
    shows="activation outliers: the largest attention logits and hidden states (Table 5)",
    presets=language.language_presets(
        cpu={"tokens": 40_000},
        gpu={"tokens": TOKENS},
        paper=PaperPreset(evaluations=(evaluation("outliers", tokens=TOKENS),)),
        cpu_minutes=0.5,
        gpu_minutes=2,
    ),
    compare=compared_by(
        *(
            ComparisonRule(
                name=name,
                paper={
                    Coordinates(rank=rank): pair for rank, pair in zip(RANKS, zip(*values, strict=True), strict=True)
                }.get,
                claimed=lambda coordinates: coordinates["rank"] != MEDIAN,
                quality=False,
            )
            for name, values in PAPER.items()
        )
    ),
    measurements="outliers",
    headline=lambda _: Headline(
        name="outliers/attention_logits",
        coordinates=Coordinates(rank=1),
        claim="DIFF's largest attention logit is smaller than the Transformer's",
    ),
    notes=(
        "Attention logits are q·k/√d as the softmax gets them, of the keys that a query sees, of all heads and layers, "
        "and of both maps of DIFF. Hidden states are the residual stream after each layer.",
        f"The paper's values are of models of 3B parameters over 0.4M tokens. {language.FIXED_TEXT} The largest of "
        "other text may be larger.",
    ),
)

# Accuracy on HellaSwag, read off the figure: DIFF and then the Transformer.
ACCURACY = {16: (0.662, 0.634), 8: (0.663, 0.627), 6: (0.660, 0.589), 4: (0.588, 0.339)}


def paper_drop(bits: int) -> tuple[float, float]:
    """Return the losses of DIFF and the Transformer on HellaSwag against 16 bits."""
    diff, softmax = (full - rounded for full, rounded in zip(ACCURACY[16], ACCURACY[bits], strict=True))
    return round(diff, 3), round(softmax, 3)


def _claimed_fig8(coordinates: Coordinates) -> bool:
    """Return whether the paper says that DIFF keeps more of its accuracy there."""
    return coordinates["bits"] in (6, 4)


FIG_8 = Experiment(
    name="fig8",
    shows="loss and accuracy with attention logits of 16, 8, 6 and 4 bits (Figure 8)",
    presets=language.language_presets(
        cpu={"tokens": 32_768},
        gpu={"tokens": 400_000},
        paper=PaperPreset(
            evaluations=(evaluation("quantised", tokens=400_000),),
            remarks=("The paper measures HellaSwag; here it is held-out text, and the paper's task is not measured.",),
        ),
        cpu_minutes=2,
        gpu_minutes=8,
    ),
    compare=compared_by(
        # The paper measures accuracy alone: whether the loss goes the same way is for us to ask. Its loss is against 16
        # bits, ours against logits as they are, which is the same to 4 digits.
        ComparisonRule(name="quantised/loss_increase", claimed=_claimed_fig8, exploratory=True),
        ComparisonRule(
            name="quantised/accuracy_drop",
            claimed=_claimed_fig8,
            paper=lambda coordinates: paper_drop(int(coordinates.position("bits"))),
        ),
    ),
    measurements="quantised",
    headline=lambda _: Headline(
        name="quantised/accuracy_drop",
        coordinates=Coordinates(bits=6, granularity="tensor"),
        claim="DIFF loses less accuracy than the Transformer with attention logits of 6 bits",
    ),
    notes=(
        "Rounded to 2^b − 1 values, in equal steps from minus the largest size to the largest: of each row (a query in "
        "a head and map), or of each tensor (all logits of a layer for one sequence). The paper does not say which.",
        "Accuracy is the share of tokens of held-out text that the model holds most likely; the paper's is on "
        f"HellaSwag, and its drop is against 16 bits. {language.FIXED_TEXT}",
    ),
)

# Parameters that both variants have; no "output" where it is tied to the embedding.
KINDS = ("q", "k", "v", "o", "mlp", "norm", "embedding", "output")
# "Equivalent in magnitude" taken at its word: within a power of ten, each way.
LIMIT = 1.0
LIMIT_VARIANT = "a tenfold difference"


def _on_evaluate(batches: Batches) -> Callable[[Any, int], dict[str, float]]:
    validation, gradients = validation_callback(batches), gradient_callback(batches)

    def on_evaluate(model: Any, step: int) -> dict[str, float]:
        return validation(model, step) | gradients(model, step)

    return on_evaluate


def _compare_appendix_g(records: Sequence[Result], preset: Preset) -> list[Comparison]:
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


APPENDIX_G = Experiment(
    name="appendix_g",
    shows="gradients of both models by kind of parameter (Appendix G)",
    presets={
        "cpu": Preset(
            recipe="language",
            overrides=(
                *language.LANGUAGE_CPU,
                "data.validation_tokens=16384",
                *section("train", steps=300, warmup_steps=30, evaluate_every=30),
            ),
            seeds=3,
            minutes=5,
        ),
        "gpu": Preset(
            recipe="language",
            overrides=(
                *language.LANGUAGE_GPU,
                "data.validation_tokens=65536",
                *section("train", steps=800, learning_rate="1e-3", evaluate_every=50),
            ),
            seeds=5,
            minutes=10,
        ),
        "paper": PaperPreset(
            evaluations=(evaluation("gradients"),),
            remarks=("The appendix argues and measures nothing; this is of the trained models alone.",),
        ),
    },
    compare=_compare_appendix_g,
    measurements="gradients_in_training",
    on_evaluate=_on_evaluate,
    logs="gradients",
    notes=(
        "Both variants have the same learning rate: that this needs no change is what the appendix is about.",
        "A size is the root mean square over the entries of the loss' gradient, on the same held-out sequences; a "
        "distance is |log10| of the ratio of DIFF's to the Transformer's, and \"equivalent in magnitude\" is taken to "
        "mean below 1: that limit is ours, and so is the question whether it holds.",
    ),
)


THROUGHPUT_NAMES = {STEP: "throughput/training", FORWARD: "throughput/forward"}
# Tokens per second of the paper's 3B models, DIFF and then the Transformer, by length.
TABLE_7_PAPER = {
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
    """Settings of the timing; one that is not given is the device's own, see `ModelSettings`."""

    device: Text = Field(default="cpu", description="a torch device")
    dtypes: tuple[str] = Field(default=("float32",), description="a dtype, in a list")
    lengths: Counts = Field(default=(2048,), description="tokens of a sequence")
    layers: Count | None = Field(default=None, description="decoder layers")
    rounds: Count | None = Field(default=None, description="alternated runs")
    check_layers: Count | None = Field(default=None, description="layers of the models whose results are checked")
    check_vocabulary: Count | None = Field(default=None, description="vocabulary of those models")


def _measure_throughput(preset: Preset, progress: Progress) -> list[Result]:
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
            if length in TABLE_7_PAPER[name]:
                diff, transformer = TABLE_7_PAPER[name][length]
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
                "It has the sizes of the 3B models, and 12 of their 28 layers. "
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
            for name, values in TABLE_7_PAPER.items()
            for rule in (
                ComparisonRule(name=f"{name}_share", against=PAPER_VARIANT, exploratory=True, quality=False),
                ComparisonRule(name=name, at=values.__contains__, paper=values.get, claimed=False, quality=False),
            )
        )
    ),
    options=ThroughputOptions,
    measure_once=_measure_throughput,
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
