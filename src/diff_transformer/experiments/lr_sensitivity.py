"""Beyond the paper: both twins at five learning rates, and what a wrong one costs each of them."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from diff_transformer.experiments.cluster import Evaluation, PaperPreset, Stage
from diff_transformer.experiments.framework import TWINS, Arm, Experiment, MeasuredRun, Preset
from diff_transformer.experiments.language import CPU, FIXED_TEXT, GPU, LOSS, by_name, loss_record, text_of
from diff_transformer.results import Comparison, Headline, Result, compare

UNIFORM = "sensitivity/loss_of_a_guess"
BEST = "sensitivity/best_loss"
EXCESS = "sensitivity/excess_loss"


def arms(rates: Sequence[float]) -> tuple[Arm, ...]:
    """The twins at each rate, which is their group."""
    return tuple(
        Arm(name=twin.name, overrides=(*twin.overrides, f"train.learning_rate={rate!r}"), group=f"{rate:g}")
        for rate in rates
        for twin in TWINS
    )


def derived(records: Sequence[Result]) -> list[Result]:
    """Of each arm and seed: its loss at the arm's best rate, and how much higher the loss is over all rates.

    The best rate has the lowest mean loss over the seeds. The mean over rates of what the loss is above that one's is
    the sensitivity of Wortsman et al. (arXiv 2309.14322); where a run diverged, or ended above it, the loss is that of
    a guess.
    """
    guesses = [record.value for record in by_name(records, UNIFORM) if math.isfinite(record.value)]
    if not guesses:
        return []
    losses: dict[str, dict[int, dict[str, float]]] = {}
    for record in by_name(records, LOSS):
        if record.seed is not None and record.group is not None:
            value = min(record.value, guesses[0]) if math.isfinite(record.value) else guesses[0]
            losses.setdefault(record.arm, {}).setdefault(record.seed, {})[record.group] = value
    found = []
    for arm, seeds in losses.items():
        best = best_rate(seeds)
        for seed, by_rate in seeds.items():
            values = {BEST: by_rate[best], EXCESS: fmean(by_rate.values()) - by_rate[best]}
            found += [
                Result(name=name, arm=arm, value=value, seed=seed, unit="nats/token", better="lower")
                for name, value in values.items()
            ]
    return found


def best_rate(seeds: Mapping[int, Mapping[str, float]]) -> str:
    """The rate with the lowest mean loss; of equals the first."""
    rates = next(iter(seeds.values()))
    return min(rates, key=lambda rate: fmean(by_rate[rate] for by_rate in seeds.values()))


def _measure(run: MeasuredRun, preset: Preset) -> list[Result]:
    guess = math.log(text_of(run).vocab_size)
    uniform = Result(name=UNIFORM, arm=run.arm.name, group=run.arm.group, value=guess, seed=run.seed)
    return [loss_record(run), uniform]


def _compare(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    rates = list(dict.fromkeys(arm.group for arm in preset.arms))
    both = derived(records)
    found = [compare(both, name, "diff", "softmax", claimed_by="us") for name in (BEST, EXCESS) if both]
    return [*found, *(compare(records, LOSS, "diff", "softmax", group=rate, claimed_by="us") for rate in rates)]


LR_SENSITIVITY = Experiment(
    name="lr_sensitivity",
    shows="both twins at five learning rates (beyond the paper; Appendix G says that both may have the same)",
    presets={
        "cpu": Preset(
            recipe="language",
            overrides=(
                *CPU,
                "model.hidden_size=64",
                "model.intermediate_size=168",
                "model.num_hidden_layers=4",
                "model.head_dim=8",
                "train.steps=180",
                "train.evaluate_every=180",
            ),
            arms=arms((1e-3, 3e-3, 1e-2, 3e-2, 1e-1)),
            seeds=3,
            minutes=7,
        ),
        "gpu": Preset(
            recipe="language",
            overrides=(*GPU, "train.steps=800", "train.evaluate_every=800"),
            arms=arms((2.5e-4, 1e-3, 4e-3, 1.6e-2, 6.4e-2)),
            seeds=2,
            minutes=25,
        ),
        "paper": PaperPreset(
            stages=(Stage(recipe="paper-830m"),),
            arms=arms((3.75e-5, 7.5e-5, 1.5e-4, 3e-4, 6e-4)),
            evaluations=(Evaluation(measure="standard"),),
            remarks=("Not the paper's: its smallest models, at a quarter of its learning rate to four times as much.",),
        ),
    },
    measure=_measure,
    compare=_compare,
    headline=lambda _: Headline(name=EXCESS),
    notes=(
        "The paper trains both with one learning rate and argues that their gradients are of one size (Appendix G); it "
        f"shows no sweep. {BEST} is the loss at the arm's best rate, {EXCESS} the mean over the rates of the loss "
        "above it. In both a run that diverged, and one whose loss is higher, counts as a guess among all tokens: that "
        f"a rate is too high is what is asked here. In {LOSS} a run that diverged is missing, and none is cut.",
        f"{LOSS} and what is made of it: {FIXED_TEXT}",
    ),
)
