"""Figure 7: how much the answers depend on the order of the same demonstrations."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from diff_transformer.data import ManyShotBatches
from diff_transformer.eval.many_shot import ORDERS, RANGE_ORDERS, check_orders, order_group, order_records
from diff_transformer.experiments.cluster import LONG_CONTEXTS, THREE_BILLION, Evaluation, PaperPreset
from diff_transformer.experiments.framework import ACCURACY, TWINS, Experiment, MeasuredRun, Preset
from diff_transformer.experiments.many_shot import CPU, NOTES, ON_GPU, guessing
from diff_transformer.results import Baseline, Comparison, Headline, Result, compare
from diff_transformer.train import Data, Recipe

# The first is judged: how far apart orders lie beyond chance, without bias. A range grows with what chance does, which
# is most at one half, so that it would follow the accuracy; a spread is the root of the first, to be read. A model that
# guesses has no orders that are better than others, so both variants must be above guessing (MEAN) for a verdict.
VARIANCE, RANGE = "many_shot/order_variance", "many_shot/order_range"
SPREAD, MEAN = "many_shot/order_spread", "many_shot/order_mean"
# Best less worst of 10 orders on TREC: DIFF, the Transformer.
PAPER = {"random": (0.040, 0.190), "alternating": (0.134, 0.567)}
_SETTINGS = ("shots", "noises", "orders", "queries", "sets")


def _measure(run: MeasuredRun, preset: Preset) -> list[Result]:
    assert isinstance(run.data.batches, ManyShotBatches)  # the presets' recipes
    settings = {name: preset.options[name] for name in _SETTINGS}
    return order_records(run.model, run.data.batches, run.arm.name, seed=run.seed, **settings)


def _check(options: Mapping[str, Any], _: Data) -> None:
    check_orders(**{name: options[name] for name in _SETTINGS})


def _parts(options: Mapping[str, Any]) -> dict[str, str]:
    """The groups of all orders, with their kinds."""
    return {order_group(kind, noise): kind for noise in options["noises"] for kind in ORDERS}


def _compare(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    found = []
    for name in (VARIANCE, RANGE, SPREAD, MEAN):
        for part, kind in _parts(preset.options).items():
            more: dict[str, Any] = {"group": part, "paper": PAPER[kind] if name == RANGE else None}
            found.append(compare(records, name, "diff", "softmax", claimed=name == VARIANCE, **more))
    return found


def _headline(options: Mapping[str, Any]) -> Headline:
    return Headline(name=VARIANCE, group=order_group(ORDERS[0], options["noises"][0]))


def _baselines(recipe: Recipe, options: Mapping[str, Any]) -> list[Baseline]:
    above: dict[str, Any] = {"accuracy": MEAN, "is_accuracy": False}
    return [
        baseline
        for part in _parts(options)
        for baseline in (
            guessing(recipe, VARIANCE, part, accuracy_group=part, **above),
            guessing(recipe, MEAN, part),
        )
    ]


FIG_7 = Experiment(
    name="fig7",
    shows="how much the answers depend on the order of the same demonstrations (Figure 7)",
    presets={
        "cpu": replace(
            CPU, options={"shots": 32, "noises": [0.1, 0.3], "orders": 30, "queries": 200, "sets": 4}, minutes=9
        ),
        "gpu": replace(
            ON_GPU, options={"shots": 256, "noises": [0.1, 0.3], "orders": 30, "queries": 200, "sets": 8}, minutes=25
        ),
        "paper": PaperPreset(
            stages=(THREE_BILLION, LONG_CONTEXTS),
            arms=TWINS,
            evaluations=(
                Evaluation(
                    measure="many_shot_orders",
                    options={"task": "trec", "folder": "your-trec", "shots": 64, "orders": 10, "queries": 100},
                ),
            ),
            remarks=(
                "Ten orders of the same demonstrations, at random and with alternating classes, as in the paper. How "
                "many demonstrations and questions it has is ours to choose.",
            ),
        ),
    },
    measure=_measure,
    compare=_compare,
    validation=ACCURACY,
    headline=_headline,
    baselines=_baselines,
    check=_check,
    notes=(
        *NOTES,
        f"The verdict is on {VARIANCE}, the variance of the accuracies after different orders less what chance alone "
        f"gives, as a mean over sets; where chance did less than usual it is below 0. {SPREAD} is "
        "the mean over seeds of its root for each, 0 where it is below 0.",
        "A model that guesses answers alike after every order, and one that is hardly better nearly so: where the 95 % "
        f"interval of a variant's {MEAN} is not above guessing, the variances are not comparable. Beyond it the "
        "variance may still be smaller for the variant that knows less, or nearly all.",
        f"{RANGE} is the best less the worst of {RANGE_ORDERS} orders, as in the paper. Most of it may be chance, "
        "which is largest where half of the answers are right: it follows the accuracy, so no verdict is on it.",
    ),
)
