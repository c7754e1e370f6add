"""Figure 7: how much the answers depend on the order of the same demonstrations."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from diff_transformer.data import ManyShotBatches
from diff_transformer.eval.many_shot import ORDERS, RANGE_ORDERS, order_group, order_records
from diff_transformer.experiments.cluster import LONG_CONTEXTS, THREE_BILLION, Evaluation, PaperPreset
from diff_transformer.experiments.framework import ACCURACY, TWINS, Experiment, MeasuredRun, Preset
from diff_transformer.experiments.many_shot import CPU, NOTES, ON_GPU
from diff_transformer.results import Comparison, Result, compare

# The first is judged: how far apart orders lie beyond chance, without bias. A range grows with what chance does, which
# is most at one half, so that it would follow the accuracy; a spread is the root of the first, to be read.
VARIANCE, RANGE = "many_shot/order_variance", "many_shot/order_range"
SPREAD, MEAN = "many_shot/order_spread", "many_shot/order_mean"
# Best less worst of 10 orders on TREC: DIFF, the Transformer.
PAPER = {"random": (0.040, 0.190), "alternating": (0.134, 0.567)}


def _measure(run: MeasuredRun, preset: Preset) -> list[Result]:
    assert isinstance(run.data.batches, ManyShotBatches)  # the presets' recipes
    settings = {name: preset.options[name] for name in ("shots", "noises", "orders", "queries", "sets")}
    return order_records(run.model, run.data.batches, run.arm.name, seed=run.seed, **settings)


def _compare(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    found = []
    for name in (VARIANCE, RANGE, SPREAD, MEAN):
        for noise in preset.options["noises"]:
            for kind in ORDERS:
                paper = PAPER[kind] if name == RANGE else None
                more: dict[str, Any] = {"group": order_group(kind, noise), "paper": paper}
                found.append(compare(records, name, "diff", "softmax", claimed=name == VARIANCE, **more))
    return found


FIG_7 = Experiment(
    name="fig7",
    shows="how much the answers depend on the order of the same demonstrations (Figure 7)",
    presets={
        "cpu": replace(
            CPU, options={"shots": 32, "noises": [0.1, 0.3], "orders": 30, "queries": 200, "sets": 4}, minutes=10
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
    uses_text=False,
    notes=(
        *NOTES,
        f"The verdict is on {VARIANCE}, the variance of the accuracies after different orders less what chance alone "
        f"gives, as a mean over sets; where chance did less than usual it is below 0. {SPREAD} is its root.",
        f"{RANGE} is the best less the worst of {RANGE_ORDERS} orders, as in the paper. Most of it may be chance, "
        "which is largest where half of the answers are right: it follows the accuracy, so no verdict is on it.",
    ),
)
