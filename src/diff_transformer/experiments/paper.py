"""The paper's own configuration of an experiment: checked without numbers, and told how a cluster would run it."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diff_transformer.eval.measures import find_measure
from diff_transformer.eval.options import chosen_options
from diff_transformer.experiments import registry
from diff_transformer.experiments.asked import preset_of
from diff_transformer.experiments.cluster import Evaluation, PaperPreset
from diff_transformer.experiments.fairness import Counts, check_counts, check_recipes, count
from diff_transformer.experiments.framework import PAPER, Arm, Experiment
from diff_transformer.experiments.heads import Heads, heads_of
from diff_transformer.train import Recipe, build_config, load_recipe
from diff_transformer.train.plan import Plan, plan, vocabulary

GPU = "h200"
NODE = 8  # GPUs of a machine
MOST_NODES = 64
# Where the machines of a run meet: the first one's address, for the reader to put in.
MEETING_POINT = "HOST:29500"


@dataclass(frozen=True)
class Training:
    """One stage of an arm.

    Attributes:
        folder: of the run; one for all experiments that need it.
        recipe: the whole of it, checked.
        plan: on the fewest whole machines of 8 GPUs that hold it.
        command: what trains it; on several machines, on each of them.
    """

    folder: str
    recipe: Recipe
    plan: Plan
    command: str


@dataclass(frozen=True)
class PaperArm:
    """An arm at the paper's size.

    Attributes:
        arm: which.
        counts: parameters of its model, built on the meta device.
        heads: of a layer.
        trainings: its stages; each begins with the model of the one before.
        evaluations: commands that measure the last one's checkpoint.
    """

    arm: Arm
    counts: Counts
    heads: Heads
    trainings: tuple[Training, ...]
    evaluations: tuple[str, ...]


def check_paper(experiment: Experiment) -> list[PaperArm]:
    """Read the recipes of an experiment's paper preset, build its models without numbers, and compare their sizes.

    Returns:
        What was found for each arm; empty for an experiment that trains nothing.

    Raises:
        ValueError: it has no such preset, a recipe is not valid, the arms are not alike, no number of GPUs holds a
            training, or a measurement has no such measure or option.
    """
    preset = paper_preset(experiment)
    for number, _ in enumerate(preset.stages):
        check_recipes({arm: _recipe(preset, arm, number) for arm in preset.arms})
    for evaluation in preset.evaluations:
        _check_evaluation(evaluation)
    recipes = {arm: preset.arm_recipe(arm) for arm in preset.arms}
    counts = {arm: count(build_config(recipe, vocabulary(recipe))) for arm, recipe in recipes.items()}
    check_counts(counts, preset)
    found = []
    for arm in preset.arms:
        trainings = tuple(_training(preset, arm, number) for number, _ in enumerate(preset.stages))
        commands = tuple(_evaluation_command(trainings[-1].folder, one) for one in preset.evaluations)
        found.append(PaperArm(arm, counts[arm], heads_of(recipes[arm]), trainings, commands))
    return found


def paper_preset(experiment: Experiment) -> PaperPreset:
    """The paper's preset of an experiment. Raises ValueError where it has none."""
    preset = preset_of(experiment, PAPER)
    assert isinstance(preset, PaperPreset)  # as every experiment of the register has it
    return preset


def folders(preset: PaperPreset) -> list[str]:
    """The folders of all runs that a preset needs."""
    return [_folder(preset, arm, number) for arm in preset.arms for number, _ in enumerate(preset.stages)]


def who_needs() -> Mapping[str, list[str]]:
    """Folder of a run → the experiments that measure it or start from it."""
    needed: dict[str, list[str]] = {}
    for experiment in map(registry.find_experiment, registry.EXPERIMENTS):
        if PAPER in experiment.presets:
            for folder in folders(paper_preset(experiment)):
                needed.setdefault(folder, []).append(experiment.name)
    return needed


def _recipe(preset: PaperPreset, arm: Arm, number: int) -> Recipe:
    stage = preset.stages[number]
    return load_recipe(preset.recipe_name(arm, stage), _settings(preset, arm, number))


def _settings(preset: PaperPreset, arm: Arm, number: int) -> list[str]:
    start = [f"model.start_from={_folder(preset, arm, number - 1)}/model"] if number else []
    return [*_called(preset, arm, number)[1], *start]


def _folder(preset: PaperPreset, arm: Arm, number: int) -> str:
    stage = preset.stages[number]
    name = f"{stage.name or preset.recipe_name(arm, stage)}-{_called(preset, arm, number)[0]}"
    return "runs/" + re.sub(r"[^a-zA-Z0-9._]+", "-", name.replace("λ", "lambda"))


def _called(preset: PaperPreset, arm: Arm, number: int) -> tuple[str, list[str]]:
    """What a stage's run is called after the stage, and its settings; alike for all experiments that need the run.

    That is the attention type where an arm is the recipe's own twin, however it is written, else the arm's label.
    """
    stage, settings = preset.stages[number], preset.settings(arm, preset.stages[number])
    name = preset.recipe_name(arm, stage)
    own = load_recipe(name, settings)
    kind = own.model.attention_type
    twin = [*stage.overrides, f"model.attention_type={kind}"]
    if _what_it_trains(load_recipe(name, twin)) == _what_it_trains(own):
        return kind, twin
    return arm.label, settings


def _what_it_trains(recipe: Recipe) -> tuple[Any, ...]:
    """Two recipes with the same are one run, however their settings are written."""
    return build_config(recipe, vocabulary(recipe)).to_dict(), recipe.data, recipe.train, recipe.model.start_from


def _training(preset: PaperPreset, arm: Arm, number: int) -> Training:
    recipe, folder = _recipe(preset, arm, number), _folder(preset, arm, number)
    planned = _plan(recipe)
    nodes = planned.devices // NODE
    several = ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", MEETING_POINT] if nodes > 1 else []
    launcher = ["torchrun", *several, "--nproc-per-node", str(NODE), "-m", "diff_transformer.train"]
    name = preset.recipe_name(arm, preset.stages[number])
    command = [*launcher, name, *_settings(preset, arm, number), "--output", folder]
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


def _check_evaluation(evaluation: Evaluation) -> None:
    if evaluation.measure:
        measure = find_measure(evaluation.measure)
        chosen_options(evaluation.options, measure.options, f"The measure {evaluation.measure}")


def _evaluation_command(folder: str, evaluation: Evaluation) -> str:
    command = ["diff-transformer", "eval", folder]
    if evaluation.tasks:
        command += ["--tasks", evaluation.tasks]
    else:
        command += ["--measure", evaluation.measure]
    if evaluation.num_fewshot is not None:
        command += ["--num-fewshot", str(evaluation.num_fewshot)]
    for name, value in evaluation.options.items():
        command += [
            "--option",
            f"{name}={value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}",
        ]
    if evaluation.text:
        command += ["--text", evaluation.text]
    return shlex.join(command)
