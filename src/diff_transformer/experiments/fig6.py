"""Figure 6: many-shot classification, by the number of demonstrations and how many of their labels are wrong."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from diff_transformer.data import ManyShotBatches
from diff_transformer.eval.many_shot import check_noises, shots_group, shots_records
from diff_transformer.experiments.cluster import LONG_CONTEXTS, THREE_BILLION, Evaluation, PaperPreset
from diff_transformer.experiments.framework import ACCURACY, TWINS, Experiment, MeasuredRun, Preset
from diff_transformer.experiments.many_shot import CPU, NOTES, ON_GPU, guessing
from diff_transformer.results import Baseline, Comparison, Headline, Result, compare
from diff_transformer.train import Recipe

NAME = "many_shot/accuracy"
# Demonstrations have 20 to 40 tokens each, so the longest prompts have 20K to 40K.
PAPER_SHOTS = [16, 32, 64, 128, 256, 512, 1024]


def _measure(run: MeasuredRun, preset: Preset) -> list[Result]:
    assert isinstance(run.data.batches, ManyShotBatches)  # the presets' recipes
    settings = {name: preset.options[name] for name in ("shots", "noises", "episodes", "queries")}
    return shots_records(run.model, run.data.batches, run.arm.name, seed=run.seed, **settings)


def _groups(options: Mapping[str, Any]) -> list[str]:
    return [shots_group(noise, shots) for noise in options["noises"] for shots in options["shots"]]


def _compare(records: Sequence[Result], preset: Preset) -> list[Comparison]:
    return [compare(records, NAME, "diff", "softmax", group=group) for group in _groups(preset.options)]


def _headline(options: Mapping[str, Any]) -> Headline:
    """With as many demonstrations as there are, the fewest of them wrong."""
    return Headline(name=NAME, group=shots_group(min(options["noises"]), max(options["shots"])))


def _baselines(recipe: Recipe, options: Mapping[str, Any]) -> list[Baseline]:
    return [guessing(recipe, NAME, group) for group in _groups(options)]


FIG_6 = Experiment(
    name="fig6",
    shows="many-shot classification by the number of demonstrations and of wrong labels among them (Figure 6)",
    presets={
        "cpu": replace(
            CPU,
            options={"shots": [8, 16, 32], "noises": [0.0, 0.1, 0.3], "episodes": 64, "queries": 32},
            minutes=9,
        ),
        "gpu": replace(
            ON_GPU,
            options={"shots": [64, 128, 256], "noises": [0.0, 0.1, 0.3], "episodes": 64, "queries": 64},
            minutes=25,
        ),
        "paper": PaperPreset(
            stages=(THREE_BILLION, LONG_CONTEXTS),
            arms=TWINS,
            evaluations=tuple(
                Evaluation(
                    measure="many_shot",
                    options={"task": task, "folder": f"your-{task}", "shots": PAPER_SHOTS, "queries": 100},
                )
                for task in ("trec", "trec-fine", "banking77", "clinc150")
            ),
            remarks=(
                "The paper shows more and more demonstrations until they fill 64K tokens. How many those are depends "
                "on the tokenizer, so the numbers of shots are ours, as is that of the questions; where a prompt is "
                "too long, the command says so before it measures.",
            ),
        ),
    },
    measure=_measure,
    compare=_compare,
    validation=ACCURACY,
    headline=_headline,
    baselines=_baselines,
    check=lambda options, _: check_noises(options["noises"]),
    notes=(
        *NOTES,
        "The paper gives mean gains of DIFF on other data: TREC 18.0, TREC-fine 21.6, Banking-77 10.4, Clinic-150 5.2 "
        "points.",
    ),
)
