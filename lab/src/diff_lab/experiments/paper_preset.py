"""Checks the paper's own configuration of an experiment without weights, and makes the commands that would run it."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from diff_lab.coordinates import Coordinates
from diff_lab.experiments.experiment import (
    EXPERIMENTS,
    PAPER,
    Experiment,
    Heads,
    ParameterCounts,
    Preset,
    Variant,
    check_counts,
    check_recipes,
    count,
    find_experiment,
    heads_of,
)
from diff_lab.experiments.request import preset_of
from diff_lab.measure.measurement import MeasurementRequest
from diff_lab.train import Recipe, build_config, load_recipe
from diff_lab.train.plan import Plan, vocabulary


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One training of every variant, with a shipped recipe. A later stage begins with the model of the one before.

    Its runs are called by `name`, or else as the recipe.
    """

    recipe: str
    overrides: tuple[str, ...] = ()
    name: str = ""


# The 3B models of Section 3.1, and their contexts of 64K tokens (Section 3.3).
THREE_BILLION = Stage(recipe="paper-3b")
LONG_CONTEXTS = Stage(recipe="paper-3b-64k")


@dataclass(frozen=True, kw_only=True)
class Evaluation(MeasurementRequest):
    """A measurement of `diff-lab eval` on a checkpoint, and its text if not that of the training."""

    text: str = ""

    def command(self, folder: str) -> str:
        """Return the command line that measures it on the run in a folder."""
        command = ["diff-lab", "eval", folder]
        if self.name == "harness":
            # With --tasks each task's results are written as soon as they are there.
            command += ["--tasks", self.options["tasks"], "--num-fewshot", str(self.options["examples"])]
            return shlex.join(command)
        command += ["--measure", self.name]
        for name, value in self.options.items():
            text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
            command += ["--option", f"{name}={text}"]
        if self.text:
            command += ["--text", self.text]
        return shlex.join(command)


def evaluation(name: str, *, text: str = "", **options: Any) -> Evaluation:
    """Return the measurement of that name, with these options."""
    return Evaluation(name=name, options=options, text=text)


@dataclass(frozen=True, kw_only=True)
class PaperPreset(Preset):
    """An experiment at the paper's size, for a cluster."""

    stages: tuple[Stage, ...] = (THREE_BILLION,)  # of training, in their order
    # Coordinates → the recipe of the first stage, where sizes have recipes of their own.
    recipes: Mapping[Coordinates, str] = field(default_factory=dict)
    evaluations: tuple[Evaluation, ...] = ()  # what is measured on every variant's last checkpoint
    commands: tuple[str, ...] = ()  # what is run besides; each is one command line
    remarks: tuple[str, ...] = ()  # what a reader must know of the commands: what is not in the paper, or cannot be had

    def variant_recipe(self, variant: Variant, *more: str) -> Recipe:
        """Return the recipe of a variant's first stage. Raises as `load_recipe` does."""
        recipe = self.recipes.get(variant.coordinates, self.stages[0].recipe)
        return load_recipe(recipe, [*self.overrides, *self.stages[0].overrides, *variant.overrides, *more])

    def runs(self, variant: Variant) -> "list[StageRun]":
        """Return the runs of a variant, one a stage, each alike for all experiments that need it.

        A run is named by the attention type if the variant is the stage's own recipe with that type, however it is
        written, else by the variant's label.
        """
        runs: list[StageRun] = []
        for stage in self.stages:
            recipe = stage.recipe if runs else self.recipes.get(variant.coordinates, stage.recipe)
            label, settings = variant.label, [*self.overrides, *stage.overrides, *variant.overrides]
            loaded = load_recipe(recipe, settings)
            attention_type = loaded.model.attention_type
            plain = [*stage.overrides, f"model.attention_type={attention_type}"]
            if _training_key(load_recipe(recipe, plain)) == _training_key(loaded):
                label, settings = attention_type, plain
            name = f"{stage.name or recipe}-{label}".replace("λ", "lambda")
            start = [f"model.init_from={runs[-1].folder}/model"] if runs else []
            folder = "runs/" + re.sub(r"[^a-zA-Z0-9._]+", "-", name)
            runs.append(StageRun(folder, recipe, [*settings, *start]))
        return runs


class StageRun(NamedTuple):
    """One stage of a variant: its folder, the shipped recipe's name, and the settings in place of that recipe's own."""

    folder: str
    recipe: str
    settings: list[str]


def _training_key(recipe: Recipe) -> tuple[Any, ...]:
    """Return a key that two recipes share if they are one run, however their settings are written."""
    return build_config(recipe, vocabulary(recipe)).to_dict(), recipe.data, recipe.train, recipe.model.init_from


GPU = "h200"
NODE = 8  # GPUs of a machine
MOST_NODES = 64
# Where the machines of a run meet: the first one's address, for the reader to put in.
MEETING_POINT = "HOST:29500"


@dataclass(frozen=True)
class PaperTraining:
    """One stage of a variant: its folder and recipe, its plan on the fewest machines of 8 GPUs that hold it, and the
    command for each of these.
    """

    folder: str
    recipe: Recipe
    plan: Plan
    command: str


@dataclass(frozen=True)
class PaperVariant:
    """A variant at the paper's size: its model's counts, the stages of its training, and commands that measure it."""

    variant: Variant
    counts: ParameterCounts
    heads: Heads
    trainings: tuple[PaperTraining, ...]
    evaluations: tuple[str, ...]


def check_paper(experiment: Experiment) -> list[PaperVariant]:
    """Read the recipes of an experiment's paper preset, build its models without numbers, and compare their sizes.

    Raises ValueError if it has no such preset, a recipe is not valid, the variants are not alike, no number of GPUs
    holds a training, or a measurement has no such measure or option.
    """
    preset = paper_preset(experiment)
    runs = {variant: preset.runs(variant) for variant in preset.variants}
    recipes = {variant: [load_recipe(run.recipe, run.settings) for run in stages] for variant, stages in runs.items()}
    for number, _ in enumerate(preset.stages):
        check_recipes({variant: stages[number] for variant, stages in recipes.items()})
    for evaluation in preset.evaluations:
        evaluation.resolve()
    counts = {variant: count(build_config(first, vocabulary(first))) for variant, (first, *_) in recipes.items()}
    check_counts(counts, preset)
    checked = []
    for variant, stages in recipes.items():
        trainings = tuple(_training(run, recipe) for run, recipe in zip(runs[variant], stages, strict=True))
        commands = tuple(one.command(trainings[-1].folder) for one in preset.evaluations)
        checked.append(PaperVariant(variant, counts[variant], heads_of(stages[0]), trainings, commands))
    return checked


def paper_preset(experiment: Experiment) -> PaperPreset:
    """Return the paper's preset of an experiment. Raises ValueError if it has none."""
    preset = preset_of(experiment, PAPER)
    assert isinstance(preset, PaperPreset)  # as every experiment of the register has it
    return preset


def experiments_by_run() -> Mapping[str, list[str]]:
    """Return for each folder of a run the experiments that measure it or start from it."""
    needed: dict[str, list[str]] = {}
    for experiment in map(find_experiment, EXPERIMENTS):
        if PAPER in experiment.presets:
            preset = paper_preset(experiment)
            for run in (run for variant in preset.variants for run in preset.runs(variant)):
                needed.setdefault(run.folder, []).append(experiment.name)
    return needed


def _training(run: StageRun, recipe: Recipe) -> PaperTraining:
    planned = _plan(recipe)
    nodes = planned.devices // NODE
    several = ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", MEETING_POINT] if nodes > 1 else []
    launcher = ["torchrun", *several, "--nproc-per-node", str(NODE), "-m", "diff_lab.train"]
    command = [*launcher, run.recipe, *run.settings, "--output", run.folder]
    return PaperTraining(run.folder, recipe, planned, shlex.join(command))


def _plan(recipe: Recipe) -> Plan:
    """Plan it on the fewest machines, doubled from 1, whose GPUs hold it."""
    nodes = 1
    while nodes <= MOST_NODES and recipe.data.batch_size % (nodes * NODE * recipe.train.accumulation) == 0:
        planned = Plan(recipe, GPU, nodes * NODE)
        if planned.ways[planned.checkpointing].fits:
            return planned
        nodes *= 2
    raise ValueError(
        f"The recipe {recipe.name!r} ({recipe.model.attention_type}) fits on no {GPU}s among which its batch of "
        f"{recipe.data.batch_size} can be divided."
    )
