"""Appendix G: the twins' gradients are of one size, and Equations 7 and 9 are what autograd computes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from diff_transformer.data import Batches
from diff_transformer.eval import validation_callback
from diff_transformer.eval.closed_forms import ERROR, closed_form_record
from diff_transformer.eval.gradients import gradient_callback, gradient_records
from diff_transformer.experiments.cluster import THREE_BILLION, Evaluation, PaperPreset
from diff_transformer.experiments.framework import TWINS, Experiment, MeasuredRun, Preset
from diff_transformer.experiments.language import CPU, GPU
from diff_transformer.results import Comparison, Result, compare, number_of
from diff_transformer.train import build_model

# Parameters that both twins have; no "output" where it is tied to the embedding.
KINDS = ("q", "k", "v", "o", "mlp", "norm", "embedding", "output")
# "Equivalent in magnitude" taken at its word: within a power of ten, each way.
LIMIT = 1.0
LIMIT_ARM = "a tenfold difference"
# What float64 leaves of a gradient over a few hundred tokens, with room.
ROUNDING = 1e-9
ROUNDING_ARM = "rounding, at most"


def _on_evaluate(batches: Batches) -> Callable[[Any, int], dict[str, float]]:
    validation, gradients = validation_callback(batches), gradient_callback(batches)

    def on_evaluate(model: Any, step: int) -> dict[str, float]:
        return validation(model, step) | gradients(model, step)

    return on_evaluate


def _measure(run: MeasuredRun, preset: Preset) -> list[Result]:
    """The gradients before training and after every part of it, and the error of the equations."""
    arm, seed, batches = run.arm.name, run.seed, run.data.batches
    start = build_model(run.recipe, run.data).eval().to(run.model.device)
    records = gradient_records(start, batches, arm, seed=seed, group="step 0")
    for line in run.metrics:
        group = f"step {line['step']}"
        for name, value in line.items():
            if name.startswith("gradient/"):
                records.append(Result(name=name, arm=arm, value=number_of(value), seed=seed, group=group))
    return [*records, closed_form_record(run.model, batches, arm, seed)]


def _compare(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    """Whether the sizes are apart by less than a power of ten, before training and in it; the sizes; the equations."""
    found = []
    kinds = [kind for kind in KINDS if any(record.name == f"gradient/{kind}" for record in records)]
    for kind in kinds:
        distances = distance_records(records, kind)
        for group in dict.fromkeys(record.group for record in distances):
            name = f"gradient/{kind}_distance"
            found.append(compare(distances, name, "diff", LIMIT_ARM, group=group, claimed_by="us"))
    steps = list(dict.fromkeys(record.group for record in records if record.name == "gradient/q"))
    for kind in kinds:
        for group in (steps[0], steps[-1]):
            found.append(compare(records, f"gradient/{kind}", "diff", "softmax", group=group, claimed=False))
    for arm in ("diff", "softmax"):
        errors = [record for record in records if (record.name, record.arm) == (ERROR, arm)]
        limits = [replace(record, value=ROUNDING, arm=ROUNDING_ARM) for record in errors]
        found.append(compare([*errors, *limits], ERROR, arm, ROUNDING_ARM, claimed_by="us"))
    return found


def distance_records(records: Sequence[Result], kind: str) -> list[Result]:
    """How far apart the twins' gradients are, |log10 of their ratio|: before training, and the mean of all steps that
    were looked at in it. The limit stands beside each as an arm of its own.
    """
    name = f"gradient/{kind}"
    sizes = {(record.seed, record.group, record.arm): record.value for record in records if record.name == name}
    apart: dict[tuple[int | None, str], list[float]] = {}
    for (seed, step, arm), value in sizes.items():
        other = sizes.get((seed, step, "softmax"))
        if arm == "diff" and other is not None:
            group = "before training" if step == "step 0" else "in training"
            apart.setdefault((seed, group), []).append(_decades(value, other))
    found = []
    for (seed, group), decades in apart.items():
        shared: dict[str, Any] = {"name": f"{name}_distance", "seed": seed, "group": group, "unit": "powers of ten"}
        for arm, value in (("diff", fmean(decades)), (LIMIT_ARM, LIMIT)):
            found.append(Result(arm=arm, value=value, better="lower", **shared))
    return found


def _decades(one: float, other: float) -> float:
    return abs(math.log10(one / other)) if one > 0 and other > 0 else math.nan


APPENDIX_G = Experiment(
    name="appendix_g",
    shows="gradients of both twins by kind of parameter; Equations 7 and 9 against autograd (Appendix G)",
    presets={
        "cpu": Preset(
            recipe="language",
            overrides=(
                *CPU,
                "data.validation_tokens=16384",
                "train.steps=300",
                "train.warmup_steps=30",
                "train.evaluate_every=30",
            ),
            arms=TWINS,
            seeds=3,
            minutes=5,
        ),
        "gpu": Preset(
            recipe="language",
            overrides=(
                *GPU,
                "data.validation_tokens=65536",
                "train.steps=800",
                "train.learning_rate=1e-3",
                "train.evaluate_every=50",
            ),
            arms=TWINS,
            seeds=5,
            minutes=10,
        ),
        "paper": PaperPreset(
            stages=(THREE_BILLION,),
            arms=TWINS,
            evaluations=(Evaluation(measure="gradients"), Evaluation(measure="closed_forms")),
            remarks=("The appendix argues and measures nothing; this is of the trained models alone.",),
        ),
    },
    compare=_compare,
    measure=_measure,
    on_evaluate=_on_evaluate,
    notes=(
        "Both arms have the same learning rate: that this needs no change is what the appendix is about.",
        "A size is the root mean square over the entries of the loss' gradient, on the same held-out sequences; a "
        "distance is |log10| of the ratio of DIFF's to the Transformer's, and \"equivalent in magnitude\" is taken to "
        "mean below 1: that limit is ours, and so is the question whether it holds. That the closed forms agree with "
        "autograd tells that code and equations are the same, and nothing of the models.",
        "The closed forms are those of a causal head without rotary embedding, with the weights of the trained model; "
        "Equation 7 with the headwise norm's own derivative, which the paper takes for 1.",
    ),
)
