"""Checks the paper's own configuration of an experiment without weights, and makes the commands that would run it."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diff_transformer.lab.coordinates import Coordinates
from diff_transformer.lab.experiments.experiment import (
    EXPERIMENTS,
    PAPER,
    Counts,
    Experiment,
    Heads,
    Preset,
    Variant,
    check_counts,
    check_recipes,
    count,
    find_experiment,
    heads_of,
)
from diff_transformer.lab.experiments.request import preset_of
from diff_transformer.lab.measure.measurement import MeasurementRequest
from diff_transformer.train import Recipe, build_config, load_recipe
from diff_transformer.train.training_plan import Plan, plan, vocabulary


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
    """What `diff-transformer eval` measures on a checkpoint, and on which text if not what the run was trained on."""

    text: str = ""

    def command(self, folder: str) -> str:
        """The command line that measures it on the run in a folder."""
        command = ["diff-transformer", "eval", folder]
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
    """The measurement of that name, with these options."""
    return Evaluation(name=name, options=options, text=text)


@dataclass(frozen=True, kw_only=True)
class PaperPreset(Preset):
    """An experiment at the paper's size, for a cluster.

    Attributes:
        stages: of training, in their order; the 3B models' unless given.
        recipes: coordinates → the recipe of the first stage, where sizes have recipes of their own.
        evaluations: what is measured on every variant's last checkpoint.
        commands: what is run besides; each is one command line.
        remarks: what a reader must know of the commands: what the paper does not say, and what cannot be had.
    """

    stages: tuple[Stage, ...] = (THREE_BILLION,)
    recipes: Mapping[Coordinates, str] = field(default_factory=dict)
    evaluations: tuple[Evaluation, ...] = ()
    commands: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    def variant_recipe(self, variant: Variant, *more: str) -> Recipe:
        """The recipe of a variant's first stage. Raises as `load_recipe` does."""
        return load_recipe(self.recipe_name(variant, self.stages[0]), self.settings(variant, self.stages[0], *more))

    def recipe_name(self, variant: Variant, stage: Stage) -> str:
        """The shipped recipe of a variant's stage."""
        return self.recipes.get(variant.coordinates, stage.recipe) if stage is self.stages[0] else stage.recipe

    def settings(self, variant: Variant, stage: Stage, *more: str) -> list[str]:
        """What replaces that recipe's own settings."""
        return [*self.overrides, *stage.overrides, *variant.overrides, *more]


GPU = "h200"
NODE = 8  # GPUs of a machine
MOST_NODES = 64
# Where the machines of a run meet: the first one's address, for the reader to put in.
MEETING_POINT = "HOST:29500"


@dataclass(frozen=True)
class Training:
    """One stage of a variant: its folder, which is one for all experiments that need the run, its whole recipe, its
    plan on the fewest machines of 8 GPUs that hold it, and the command for each of these.
    """

    folder: str
    recipe: Recipe
    plan: Plan
    command: str


@dataclass(frozen=True)
class PaperVariant:
    """A variant at the paper's size: what its model has, the stages of its training, and commands that measure it."""

    variant: Variant
    counts: Counts
    heads: Heads
    trainings: tuple[Training, ...]
    evaluations: tuple[str, ...]


def check_paper(experiment: Experiment) -> list[PaperVariant]:
    """Read the recipes of an experiment's paper preset, build its models without numbers, and compare their sizes.

    Returns:
        What was found for each variant; empty for an experiment that trains nothing.

    Raises:
        ValueError: it has no such preset, a recipe is not valid, the variants are not alike, no number of GPUs holds a
            training, or a measurement has no such measure or option.
    """
    preset = paper_preset(experiment)
    for number, _ in enumerate(preset.stages):
        check_recipes({variant: _recipe(preset, variant, number) for variant in preset.variants})
    for evaluation in preset.evaluations:
        evaluation.resolve()
    recipes = {variant: preset.variant_recipe(variant) for variant in preset.variants}
    counts = {variant: count(build_config(recipe, vocabulary(recipe))) for variant, recipe in recipes.items()}
    check_counts(counts, preset)
    checked = []
    for variant in preset.variants:
        trainings = tuple(_training(preset, variant, number) for number, _ in enumerate(preset.stages))
        commands = tuple(one.command(trainings[-1].folder) for one in preset.evaluations)
        checked.append(PaperVariant(variant, counts[variant], heads_of(recipes[variant]), trainings, commands))
    return checked


def paper_preset(experiment: Experiment) -> PaperPreset:
    """The paper's preset of an experiment. Raises ValueError where it has none."""
    preset = preset_of(experiment, PAPER)
    assert isinstance(preset, PaperPreset)  # as every experiment of the register has it
    return preset


def folders(preset: PaperPreset) -> list[str]:
    """The folders of all runs that a preset needs."""
    return [_folder(preset, variant, number) for variant in preset.variants for number, _ in enumerate(preset.stages)]


def experiments_by_run() -> Mapping[str, list[str]]:
    """Folder of a run → the experiments that measure it or start from it."""
    needed: dict[str, list[str]] = {}
    for experiment in map(find_experiment, EXPERIMENTS):
        if PAPER in experiment.presets:
            for folder in folders(paper_preset(experiment)):
                needed.setdefault(folder, []).append(experiment.name)
    return needed


def _recipe(preset: PaperPreset, variant: Variant, number: int) -> Recipe:
    stage = preset.stages[number]
    return load_recipe(preset.recipe_name(variant, stage), _settings(preset, variant, number))


def _settings(preset: PaperPreset, variant: Variant, number: int) -> list[str]:
    start = [f"model.init_from={_folder(preset, variant, number - 1)}/model"] if number else []
    return [*_called(preset, variant, number)[1], *start]


def _folder(preset: PaperPreset, variant: Variant, number: int) -> str:
    stage = preset.stages[number]
    name = f"{stage.name or preset.recipe_name(variant, stage)}-{_called(preset, variant, number)[0]}"
    return "runs/" + re.sub(r"[^a-zA-Z0-9._]+", "-", name.replace("λ", "lambda"))


def _called(preset: PaperPreset, variant: Variant, number: int) -> tuple[str, list[str]]:
    """What a stage's run is called after the stage, and its settings; alike for all experiments that need the run.

    That is the attention type where a variant is the recipe's own twin, however it is written, else its label.
    """
    stage, settings = preset.stages[number], preset.settings(variant, preset.stages[number])
    name = preset.recipe_name(variant, stage)
    recipe = load_recipe(name, settings)
    kind = recipe.model.attention_type
    twin = [*stage.overrides, f"model.attention_type={kind}"]
    if _training_key(load_recipe(name, twin)) == _training_key(recipe):
        return kind, twin
    return variant.label, settings


def _training_key(recipe: Recipe) -> tuple[Any, ...]:
    """Two recipes with the same are one run, however their settings are written."""
    return build_config(recipe, vocabulary(recipe)).to_dict(), recipe.data, recipe.train, recipe.model.init_from


def _training(preset: PaperPreset, variant: Variant, number: int) -> Training:
    recipe, folder = _recipe(preset, variant, number), _folder(preset, variant, number)
    planned = _plan(recipe)
    nodes = planned.devices // NODE
    several = ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", MEETING_POINT] if nodes > 1 else []
    launcher = ["torchrun", *several, "--nproc-per-node", str(NODE), "-m", "diff_transformer.train"]
    name = preset.recipe_name(variant, preset.stages[number])
    command = [*launcher, name, *_settings(preset, variant, number), "--output", folder]
    return Training(folder, recipe, planned, shlex.join(command))


def _plan(recipe: Recipe) -> Plan:
    """On the fewest machines, doubled from 1, whose GPUs hold it."""
    nodes = 1
    while nodes <= MOST_NODES and recipe.data.batch_size % (nodes * NODE * recipe.train.accumulation) == 0:
        planned = plan(recipe, GPU, nodes * NODE)
        if planned.ways[planned.checkpointing].fits:
            return planned
        nodes *= 2
    raise ValueError(
        f"The recipe {recipe.name!r} ({recipe.model.attention_type}) fits on no {GPU}s among which its batch of "
        f"{recipe.data.batch_size} can be divided."
    )
